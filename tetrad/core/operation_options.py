"""What a server's operator decides: order of service, limits, who may do what, what is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, model_validator

from tetrad.core.extras import install
from tetrad.core.option import Config, option

AccessLog = Literal["off", "text", "json"]


def _origins(values: Any) -> Any:
    """vLLM's flag takes a JSON list in one word."""
    if isinstance(values, list | tuple) and len(values) == 1 and str(values[0]).startswith("["):
        try:
            values = tuple(json.loads(values[0]))
        except ValueError:
            raise ValueError("neither origins nor a JSON list of them") from None
    for origin in values:
        if origin != "*" and ("://" not in origin or origin.endswith("/")):
            raise ValueError("an origin is * or like https://app.example.com")
    return values


class OperationOptions(Config):
    """Options of `tetrad serve` that have nothing to do with the model."""

    enable_priority_scheduling: bool = option(
        False,
        "Schedule by the requests' field priority, an integer: higher first; among equals API keys "
        "take turns, then by arrival. Without this flag the field has no effect.",
        group="Scheduling",
    )
    schedule_low_priority_values_first: bool = option(
        False, "Lower numbers are higher priorities, as in vLLM.", group="Scheduling"
    )
    priority_scheduling_preemption_threshold: int = option(
        10,
        "A waiting request may preempt a running one whose priority is lower by more than this.",
        group="Scheduling",
        ge=0,
        le=2**32,
    )
    abort_on_priority_when_disabled: bool = option(
        False,
        "Refuse requests with a priority unless --enable-priority-scheduling is given.",
        group="Scheduling",
    )
    max_queued_tokens: int | None = option(
        None,
        "Most prompt tokens of requests without a first token yet; a request beyond that is "
        "refused with Retry-After, unless it is the only one. Default: no limit.",
        group="Scheduling",
        ge=1,
    )
    request_timeout: float | None = option(
        None,
        "Most seconds from a request's arrival to its last byte; its field timeout or its header "
        "X-Request-Timeout can only shorten this. Default: no limit.",
        group="Scheduling",
        gt=0,
    )

    admin_api_key: str | None = option(
        None,
        "Key for the administrative routes, such as /flush_cache; other keys no longer open them.",
        group="Access",
        env=("TETRAD_ADMIN_API_KEY",),
    )
    api_key_file: Path | None = option(
        None,
        "File with further keys, a line each: NAME KEY. Names appear in the access log, and keys "
        "take turns when requests wait.",
        group="Access",
    )
    allowed_origins: Annotated[tuple[str, ...], BeforeValidator(_origins)] = option(
        (),
        "Origins of web pages that may call the server (CORS), or * for all. Default: none.",
        aliases=("--cors-allow-origins",),
        group="Access",
    )
    max_request_body: float = option(
        32.0, "Largest body of a request in MiB.", group="Access", gt=0, le=256
    )
    root_path: str = option(
        "",
        "Path under which a proxy serves this server, such as /llm, whether it strips the path or "
        "not.",
        aliases=("--fastapi-root-path",),
        group="Access",
    )
    ssl_certfile: Path | None = option(
        None, "Certificate and chain (PEM): serve HTTPS.", group="Access"
    )
    ssl_keyfile: Path | None = option(
        None, "Private key of --ssl-certfile (PEM), unless it is in the same file.", group="Access"
    )
    ssl_keyfile_password: str | None = option(
        None, "Password of --ssl-keyfile.", group="Access", env=("TETRAD_SSL_KEYFILE_PASSWORD",)
    )
    ssl_ca_certs: Path | None = option(
        None,
        "Certificate authorities (PEM): accept only clients with a certificate from one of them.",
        group="Access",
    )

    access_log: AccessLog = option(
        "off",
        "Print a line on stderr for each finished request, as text or JSON.",
        group="Observability",
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "Send a trace of each request by OTLP over HTTP to this address, such as "
        f"http://localhost:4318/v1/traces. Needs {install('otel')}.",
        group="Observability",
    )
    profile_dir: Path | None = option(
        None,
        "Folder for traces of torch's profiler; /start_profile is refused without it.",
        group="Observability",
    )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.ssl_certfile is None:
            for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"):
                if getattr(self, name) is not None:
                    flag = "--" + name.replace("_", "-")
                    raise ValueError(f"{flag} needs --ssl-certfile; without it HTTP is served")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ValueError("--root-path begins with / and does not end with one, as in /llm")
        return self
