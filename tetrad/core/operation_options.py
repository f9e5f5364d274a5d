"""What an operator of the server sets: scheduling policy, limits, access, observability."""

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
            raise ValueError("neither origins nor a JSON list of origins") from None
    for origin in values:
        if origin != "*" and ("://" not in origin or origin.endswith("/")):
            raise ValueError("an origin is * or like https://app.example.com")
    return values


class OperationOptions(Config):
    """Options of `tetrad serve` that have nothing to do with the model."""

    enable_priority_scheduling: bool = option(
        False,
        "Schedule by the request field priority, an integer, higher first. Within a priority API "
        "keys take turns, then by arrival. Without this flag the field has no effect.",
        group="Scheduling",
    )
    schedule_low_priority_values_first: bool = option(
        False, "Serve lower priority values first, as in vLLM.", group="Scheduling"
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
        "Maximum prompt tokens of requests that have no token yet; a request beyond that is "
        "refused with Retry-After, unless it is the only one. Default: no limit.",
        group="Scheduling",
        ge=1,
    )
    request_timeout: float | None = option(
        None,
        "Maximum seconds from a request's arrival to its last byte; its field timeout or its "
        "header X-Request-Timeout can only shorten this. Default: no limit.",
        group="Scheduling",
        gt=0,
    )

    admin_api_key: str | None = option(
        None,
        "Key for admin routes such as /flush_cache; other keys then no longer open them.",
        group="Access",
        env=("TETRAD_ADMIN_API_KEY",),
    )
    api_key_file: Path | None = option(
        None,
        "File of additional keys, one per line: NAME KEY. Names appear in the access log, and keys "
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
        32.0, "Maximum size of a request body in MiB.", group="Access", gt=0, le=256
    )
    root_path: str = option(
        "",
        "Path under which a proxy serves this server, such as /llm, whether or not the proxy "
        "strips it.",
        aliases=("--fastapi-root-path",),
        group="Access",
    )
    ssl_certfile: Path | None = option(
        None, "Certificate and chain (PEM); turns on HTTPS.", group="Access"
    )
    ssl_keyfile: Path | None = option(
        None, "Private key of --ssl-certfile (PEM), unless it is in the same file.", group="Access"
    )
    ssl_keyfile_password: str | None = option(
        None, "Password of --ssl-keyfile.", group="Access", env=("TETRAD_SSL_KEYFILE_PASSWORD",)
    )
    ssl_ca_certs: Path | None = option(
        None,
        "Certificate authorities (PEM); only clients with a certificate from one are accepted.",
        group="Access",
    )

    access_log: AccessLog = option(
        "off",
        "Print one line per finished request to stderr, as text or JSON.",
        group="Observability",
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "Export a trace of each request over OTLP/HTTP to this address, such as "
        f"http://localhost:4318/v1/traces. Needs {install('otel')}.",
        group="Observability",
    )
    profile_dir: Path | None = option(
        None,
        "Folder for torch profiler traces; without it /start_profile is refused.",
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
            raise ValueError("--root-path must begin with / and not end with one, as in /llm")
        return self
