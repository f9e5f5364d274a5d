"""What `tetrad bench serve` was asked. Names and meanings are those of `sglang.bench_serving`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from tetrad.core.config import Config, option

BackendName = Literal[
    "tetrad",
    "sglang",
    "sglang-native",
    "sglang-oai",
    "sglang-oai-chat",
    "vllm",
    "vllm-chat",
    "openai",
    "openai-chat",
]
DatasetName = Literal["random-ids", "random", "custom"]

Port = Annotated[int, Field(ge=1, le=65535)]


def server_url(address: str) -> str:
    """The root of a server as people write it: `host:port` without a scheme, or the `/v1` that
    OpenAI's clients want at the end."""
    url = address if "://" in address else f"http://{address}"
    return url.rstrip("/").removesuffix("/v1")


class BenchServeConfig(Config):
    """A run of the load generator."""

    backend: BackendName = option(
        "tetrad",
        "Which API to speak: tetrad, sglang and sglang-native use /generate; openai, sglang-oai "
        "and vllm use /v1/completions; the -chat ones use /v1/chat/completions.",
        group="Server",
    )
    base_url: str | None = option(
        None, "Address of the server, such as http://10.0.0.2:30000; replaces host and port."
    )
    host: str = option("127.0.0.1", "Host of the server.")
    port: Port | None = option(
        None, "Port of the server. Default: 8000 for the vllm backends, else 30000."
    )
    model: str | None = option(
        None, "Name of the model to ask for. Default: the first one of /v1/models."
    )
    tokenizer: Path | None = option(
        None,
        "Folder with the model's tokenizer.json. Default: the folder the server names, when it is "
        "on this machine.",
    )
    header: tuple[str, ...] = option((), "Headers to send with every request, as Name=value.")
    api_key: str | None = option(None, "Sent as a bearer token.", env="OPENAI_API_KEY")
    ready_check_timeout_sec: float = option(
        60.0, "Seconds to wait for the server to answer before starting; 0 does not wait.", ge=0
    )
    request_timeout_sec: float = option(
        600.0, "A request fails after this many seconds without a byte from the server.", gt=0
    )

    dataset_name: DatasetName = option(
        "random-ids",
        "random-ids: random token ids, exact lengths; random: random text whose length is exact by "
        "the tokenizer; custom: --dataset-path.",
        group="Workload",
    )
    dataset_path: Path | None = option(
        None,
        "JSONL file for custom: each line has prompt, messages or input_ids, and may have "
        "output_len.",
        group="Workload",
    )
    num_prompts: int | None = option(
        None,
        "Number of requests. Default: 1000, or every line of a file.",
        group="Workload",
        ge=1,
    )
    random_input_len: int = option(
        1024, "Longest prompt of the random datasets, in tokens.", group="Workload", ge=1
    )
    random_output_len: int = option(
        1024,
        "Longest output of the random datasets, in tokens; also of file lines that name none.",
        group="Workload",
        ge=1,
    )
    random_range_ratio: float = option(
        0.0,
        "Lengths are drawn evenly from [length * ratio, length]; 1 makes all of them the longest. "
        "The default 0 therefore halves them on average.",
        group="Workload",
        ge=0.0,
        le=1.0,
    )
    seed: int | None = option(
        None,
        "Seed of lengths, arrivals and content. Default: 42 for lengths and arrivals, fresh "
        "content for every run, so that no earlier run has filled the server's prefix cache.",
        group="Workload",
        ge=0,
        le=2**63 - 1,
    )
    disable_ignore_eos: bool = option(
        False, "Let the model stop early; else it must give the full length.", group="Workload"
    )
    disable_stream: bool = option(
        False, "Ask for whole answers; only end-to-end latency can be measured.", group="Workload"
    )
    temperature: float = option(0.0, "Sampling temperature.", group="Workload", ge=0.0)
    extra_request_body: str | None = option(
        None, "JSON object merged into every request's body.", group="Workload"
    )

    request_rate: float = option(
        math.inf,
        "Mean requests per second of Poisson arrivals; inf sends all at once.",
        group="Load",
        gt=0.0,
    )
    max_concurrency: int | None = option(
        None, "Most requests in flight; the others wait in the client.", group="Load", ge=1
    )
    warmup_requests: int = option(
        1,
        "Requests of the same lengths (at most 32 output tokens) before the run; not measured, and "
        "with prompts of their own.",
        group="Load",
        ge=0,
    )
    flush_cache: bool = option(
        False,
        "Empty the server's prefix cache after the warm-up (POST /flush_cache).",
        group="Load",
    )

    output_file: Path | None = option(
        None,
        "Append the result to this JSONL file: SGLang's keys, and the full record under 'tetrad'.",
        group="Result",
    )
    output_details: bool = option(
        False, "Write every request's lengths, times and text too.", group="Result"
    )
    allow_failures: int = option(
        0, "Exit with 0 although up to this many requests failed.", group="Result", ge=0
    )
    disable_tqdm: bool = option(False, "Show no progress bar.", group="Result")

    @field_validator("extra_request_body")
    @classmethod
    def _is_an_object(cls, text: str | None) -> str | None:
        if text is not None and not isinstance(_parsed(text), dict):
            raise ValueError("the extra body must be a JSON object such as '{\"top_p\": 0.9}'")
        return text

    @field_validator("header")
    @classmethod
    def _has_a_value(cls, headers: tuple[str, ...]) -> tuple[str, ...]:
        for header in headers:
            if "=" not in header:
                raise ValueError(f"header {header!r} must have the form Name=value")
        return headers

    @model_validator(mode="after")
    def _has_its_file(self) -> BenchServeConfig:
        if self.dataset_name == "custom" and self.dataset_path is None:
            raise ValueError("the custom dataset needs --dataset-path FILE.jsonl")
        if self.dataset_name != "custom" and self.dataset_path is not None:
            raise ValueError(
                f"the {self.dataset_name} dataset reads no file; use --dataset-name custom for one"
            )
        return self

    @property
    def extra_body(self) -> dict[str, Any]:
        """`extra_request_body`, parsed."""
        return dict(json.loads(self.extra_request_body or "{}"))

    @property
    def url(self) -> str:
        """Where the server is, without a slash at the end."""
        if self.base_url is not None:
            return server_url(self.base_url)
        port = self.port or (8000 if self.backend.startswith("vllm") else 30000)
        return f"http://{self.host}:{port}"


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"the extra body is not valid JSON: {error}") from error
