"""Where `tetrad bench serve` sends its load."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from tetrad.core.option import CLIENT_KEY, Config, option

BackendName = Literal[
    "tetrad",
    "sglang",
    "sglang-native",
    "sglang-oai",
    "sglang-oai-chat",
    "vllm",
    "vllm-chat",
    "lmdeploy",
    "lmdeploy-chat",
    "llamacpp",
    "llamacpp-chat",
    "openai",
    "openai-chat",
]

Port = Annotated[int, Field(ge=1, le=65535)]
PORTS = {"vllm": 8000, "lmdeploy": 23333, "llamacpp": 8080}
"""Default port of a backend and of its -chat twin."""


def server_url(address: str) -> str:
    """The root of a server as people write it: `host:port` without a scheme, or the `/v1` that
    OpenAI's clients want at the end."""
    url = address if "://" in address else f"http://{address}"
    return url.rstrip("/").removesuffix("/v1")


def without_credentials(text: str) -> str:
    """The text with the user and password of every URL in it masked."""
    return re.sub(r"(?<=://)[^/@\s]*@", "***@", text)


class ServerOptions(Config):
    """Which server, which API, and what it takes to be let in."""

    backend: BackendName = option(
        "tetrad",
        "Which API to speak: tetrad, sglang and sglang-native use /generate; openai, sglang-oai, "
        "vllm, lmdeploy and llamacpp use /v1/completions; the -chat ones /v1/chat/completions.",
        group="Server",
    )
    base_url: str | None = option(
        None, "Address of the server, such as http://10.0.0.2:30000; replaces host and port."
    )
    host: str = option("127.0.0.1", "Host of the server.")
    port: Port | None = option(
        None,
        "Port of the server. Default: 8000 for vllm, 23333 for lmdeploy, 8080 for llamacpp, else "
        "30000.",
    )
    model: str | None = option(
        None, "Name of the model to ask for. Default: the first one of /v1/models."
    )
    served_model_name: str | None = option(
        None, "Name to send where the server's name of the model is not that of --model."
    )
    tokenizer: Path | None = option(
        None,
        "Folder with the model's tokenizer.json, or a GGUF file. Default: what the server names, "
        "or --model, when it is on this machine.",
    )
    header: tuple[str, ...] = option((), "Headers to send with every request, as Name=value.")
    api_key: str | None = option(None, "Sent as a bearer token.", env=CLIENT_KEY)
    authorization: str | None = option(
        None, "Sent as the Authorization header as it is; --api-key goes before.", env=("API_KEY",)
    )
    ready_check_timeout_sec: float = option(
        60.0, "Seconds to wait for the server to answer before starting; 0 does not wait.", ge=0
    )
    request_timeout_sec: float = option(
        600.0, "A request fails after this many seconds without a byte from the server.", gt=0
    )

    @field_validator("host")
    @classmethod
    def _is_alone(cls, host: str) -> str:
        if "/" in host or host.count(":") == 1:
            raise ValueError(
                "a host alone was expected; --port gives the port, and --base-url takes an address "
                "such as http://far:30000"
            )
        return host

    @field_validator("header")
    @classmethod
    def _has_a_value(cls, headers: tuple[str, ...]) -> tuple[str, ...]:
        for header in headers:
            if "=" not in header:
                raise ValueError(f"header {header!r} must have the form Name=value")
        return headers

    @property
    def url(self) -> str:
        """Where the server is, without a slash at the end."""
        if self.base_url is not None:
            return server_url(self.base_url)
        port = self.port or PORTS.get(self.backend.removesuffix("-chat"), 30000)
        is_ipv6 = ":" in self.host and not self.host.startswith("[")
        return f"http://[{self.host}]:{port}" if is_ipv6 else f"http://{self.host}:{port}"

    @property
    def headers(self) -> dict[str, str]:
        """What goes with every request."""
        headers = dict(header.split("=", 1) for header in self.header)
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        elif self.authorization is not None:
            headers["Authorization"] = self.authorization
        return headers
