"""What `tetrad bench sweep` was asked: all that a run takes, and which settings to vary."""

from __future__ import annotations

import math
import re
from pathlib import Path

from pydantic import field_validator, model_validator

from tetrad.bench.options import BenchServeConfig
from tetrad.core.config import option

LENGTHS = re.compile(r"(?P<input>[1-9]\d*)/(?P<output>[1-9]\d*)")
REPLACED = {
    "concurrency": ("max_concurrency",),
    "request_rates": ("request_rate", "rate_profile"),
    "lengths": ("random_input_len", "random_output_len"),
}
"""List of points → the options that it takes the place of."""


def split(text: str) -> list[str]:
    """Words between commas."""
    return [word.strip() for word in text.split(",")] if text.strip() else []


class BenchSweepConfig(BenchServeConfig):
    """A run of the load generator at each of several points."""

    concurrency: str = option(
        "",
        "Points: most requests in flight, such as 256,512,1024,2048.",
        group="Sweep",
    )
    request_rates: str = option(
        "", "Points: mean requests per second, such as 1,2,4,inf.", group="Sweep"
    )
    lengths: str = option(
        "",
        "Points: prompt and output tokens of the random datasets, such as 128/128,1024/256. With "
        "two lists every pair is a point.",
        group="Sweep",
    )
    requests_per_slot: int = option(
        4,
        "Random datasets without --num-prompts send this times --concurrency requests at a point.",
        group="Sweep",
        ge=1,
    )
    results: Path | None = option(
        None,
        "JSONL file that keeps a record for each point; points that it holds are not run again.",
        group="Sweep",
    )
    retry_failed: bool = option(
        False, "Run points of --results again whose requests failed.", group="Sweep"
    )

    @field_validator("concurrency")
    @classmethod
    def _counts(cls, text: str) -> str:
        for word in split(text):
            if not word.isdecimal() or int(word) < 1:
                raise ValueError(f"{word!r} must be a whole number above 0")
        return _no_twins(text)

    @field_validator("request_rates")
    @classmethod
    def _rates(cls, text: str) -> str:
        for word in split(text):
            try:
                rate = float(word)
            except ValueError:
                rate = math.nan
            if not rate > 0:
                raise ValueError(f"{word!r} must be a number above 0, or inf")
        return _no_twins(text)

    @field_validator("lengths")
    @classmethod
    def _pairs(cls, text: str) -> str:
        for word in split(text):
            if LENGTHS.fullmatch(word) is None:
                raise ValueError(f"{word!r} must be PROMPT/OUTPUT in tokens, such as 128/128")
        return _no_twins(text)

    @model_validator(mode="after")
    def _has_points(self) -> BenchSweepConfig:
        given = [name for name in REPLACED if split(getattr(self, name))]
        if not given:
            raise ValueError(
                "a sweep needs its points: --concurrency 256,512, --request-rates 1,2,inf or "
                "--lengths 128/128,1024/256"
            )
        for name in given:
            for other in REPLACED[name]:
                if other in self.model_fields_set:
                    raise ValueError(
                        f"{_flag(name)} takes the place of {_flag(other)}; give one of them"
                    )
        if self.lengths and not self.dataset_name.startswith("random"):
            raise ValueError(
                f"--lengths is for the random datasets; {self.dataset_name} has lengths of its own"
            )
        if self.result_filename is not None:
            raise ValueError(
                "--result-filename names one file and every point writes its own; --result-dir "
                "says where"
            )
        return self

    @model_validator(mode="after")
    def _can_fill_its_slots(self) -> BenchSweepConfig:
        most = max(self.concurrencies, default=0)
        if self.num_prompts is not None and self.num_prompts < most:
            raise ValueError(
                f"--num-prompts {self.num_prompts} never puts {most} requests in flight; give at "
                "least as many, or leave it out"
            )
        return self

    @property
    def concurrencies(self) -> list[int]:
        """`concurrency`, read."""
        return [int(word) for word in split(self.concurrency)]

    @property
    def rates(self) -> list[float]:
        """`request_rates`, read; may hold infinity."""
        return [float(word) for word in split(self.request_rates)]

    @property
    def length_pairs(self) -> list[tuple[int, int]]:
        """`lengths`, read: (prompt, output) in tokens."""
        found = [LENGTHS.fullmatch(word) for word in split(self.lengths)]
        return [(int(match["input"]), int(match["output"])) for match in found if match]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _no_twins(text: str) -> str:
    words = split(text)
    for word in words:
        if words.count(word) > 1:
            raise ValueError(f"{word} is there twice")
    return text
