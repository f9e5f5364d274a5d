"""What `tetrad bench serve` was asked. Names and meanings are those of `sglang.bench_serving`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from pydantic import field_validator, model_validator

from tetrad.bench.figures.goodput import parse_objectives
from tetrad.bench.options.target import without_credentials
from tetrad.bench.options.telemetry import TelemetryOptions
from tetrad.bench.workload.rates import parse_profile
from tetrad.core.option import option

SECRET = {"api_key", "authorization", "header"}


class BenchServeConfig(TelemetryOptions):
    """A run of the load generator."""

    request_rate: float = option(
        math.inf,
        "Mean requests per second; inf sends all at once.",
        group="Load",
        gt=0.0,
        allow_inf_nan=True,
    )
    burstiness: float = option(
        1.0,
        "How even arrivals at a rate are: gaps are gamma distributed with this shape. 1 is "
        "Poisson, below 1 comes in bursts, inf is constant.",
        group="Load",
        gt=0.0,
        allow_inf_nan=True,
    )
    rate_profile: tuple[str, ...] = option(
        (),
        "Rates over time in place of --request-rate, as RATE:SECONDS for a step and FROM-TO:SECONDS"
        " for a ramp; the last rate holds for requests beyond.",
        group="Load",
    )
    max_concurrency: int | None = option(
        None, "Most requests in flight; the others wait in the client.", group="Load", ge=1
    )
    workers: int | None = option(
        None,
        "Load processes. Default: one for every 1024 requests in flight, half of the cores at "
        "most.",
        group="Load",
        ge=1,
        le=256,
    )
    warmup_requests: int = option(
        1,
        "Requests of the same lengths (at most 32 output tokens) before the run; not measured, and "
        "with prompts of their own.",
        group="Load",
        ge=0,
    )
    warmup_until_steady: bool = option(
        False,
        "Warm up with rounds of requests of the run's lengths and concurrency until two rounds "
        "differ by less than 5 % in output throughput, ten rounds at most.",
        group="Load",
    )
    repeat: int = option(
        1,
        "Measure so many times, with fresh prompts each, and tell medians and their intervals.",
        group="Load",
        ge=1,
        le=1000,
    )
    flush_cache: bool = option(
        False,
        "Empty the server's prefix cache after the warm-up (POST /flush_cache).",
        group="Load",
    )
    flush_cache_timeout: float = option(
        60.0,
        "Seconds the server may wait for running requests before it flushes.",
        group="Load",
        gt=0.0,
    )

    output_file: Path | None = option(
        None,
        "Append the result to this JSONL file: SGLang's keys, and the full record under 'tetrad'.",
        group="Result",
    )
    output_details: bool = option(
        False, "Write every request's lengths, times and text too.", group="Result"
    )
    goodput: tuple[str, ...] = option(
        (),
        "Count requests that met these bounds, as ttft:MS, tpot:MS and e2el:MS.",
        group="Result",
    )
    save_result: bool = option(
        False,
        "Write a JSON file with vLLM's keys, named after backend, rate, model and time.",
        group="Result",
    )
    save_detailed: bool = option(
        False, "Write every request's figures and text into that file too.", group="Result"
    )
    result_dir: Path | None = option(
        None, "Folder of that file. Default: the current one.", group="Result"
    )
    result_filename: str | None = option(None, "Name of that file.", group="Result")
    html: Path | None = option(
        None,
        "Write a report to this file: figures, plots, failures; it loads nothing from elsewhere.",
        group="Result",
    )
    png: Path | None = option(
        None,
        "Write the report's plots into this folder as PNG files; needs matplotlib.",
        group="Result",
    )
    csv: Path | None = option(
        None, "Write the figures to this CSV file, a row for each run.", group="Result"
    )
    tag: str | None = option(None, "A word that goes into the result's line.", group="Result")
    cache_report: bool = option(
        False, "Show how many prompt tokens came from the server's prefix cache.", group="Result"
    )
    allow_failures: int = option(
        0, "Exit with 0 although up to this many requests failed.", group="Result", ge=0
    )
    disable_tqdm: bool = option(False, "Show no progress bar.", group="Result")

    @field_validator("goodput")
    @classmethod
    def _are_objectives(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        parse_objectives(words)
        return words

    @property
    def keeps_requests(self) -> bool:
        """Whether the record of the run must hold every request."""
        return self.output_details or self.save_result

    @property
    def has_rate(self) -> bool:
        """Or all requests are sent at once."""
        return bool(self.rate_profile) or math.isfinite(self.request_rate)

    @field_validator("rate_profile")
    @classmethod
    def _is_a_profile(cls, pieces: tuple[str, ...]) -> tuple[str, ...]:
        parse_profile(pieces)
        return pieces

    @model_validator(mode="after")
    def _saves_where_it_is_told(self) -> BenchServeConfig:
        if not self.save_result:
            for name in ("save_detailed", "result_dir", "result_filename"):
                if getattr(self, name):
                    flag = "--" + name.replace("_", "-")
                    raise ValueError(f"{flag} is about the file of --save-result; give both")
        if self.result_filename is not None and self.repeat > 1:
            raise ValueError(
                "--result-filename names one file and every repetition writes its own; "
                "--result-dir says where"
            )
        return self

    @model_validator(mode="after")
    def _has_one_rate(self) -> BenchServeConfig:
        if self.rate_profile and not math.isinf(self.request_rate):
            raise ValueError("--rate-profile takes the place of --request-rate; give one of them")
        return self

    @model_validator(mode="after")
    def _can_be_met(self) -> BenchServeConfig:
        times = {word.partition(":")[0] for word in self.goodput} & {"ttft", "tpot"}
        if self.disable_stream and times:
            raise ValueError(
                f"--goodput {times.pop()} needs a stream, whose first token has a time; leave "
                "--disable-stream out or bound e2el alone"
            )
        return self

    @property
    def asked(self) -> dict[str, Any]:
        """What differs from the defaults, as JSON has it, without keys and headers."""
        values = self.model_dump(mode="json", exclude_defaults=True, exclude=SECRET)
        if self.base_url is not None:
            values["base_url"] = without_credentials(self.base_url)
        return {name: "inf" if value == math.inf else value for name, value in values.items()}
