"""What `tetrad bench sweep` was asked: all that a run takes, and which settings to vary."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import field_validator, model_validator

from tetrad.bench.options.serve import BenchServeConfig
from tetrad.core.option import option

LENGTHS = re.compile(r"(?P<input>[1-9]\d*)/(?P<output>[1-9]\d*)")
BOUND = re.compile(
    r"((?P<statistic>mean|median|p90|p95|p99)_)?(?P<latency>ttft|tpot|itl|e2el):"
    r"(?P<most>\d+(\.\d+)?)"
)
LIMITS = (1, 4096)
FEWEST_REQUESTS = 10
"""Of fewer a percentile says nothing."""
REPLACED = {
    "concurrency": ("max_concurrency",),
    "request_rates": ("request_rate", "rate_profile"),
    "lengths": ("random_input_len", "random_output_len"),
}
"""List of points → the options that it takes the place of."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What a latency may be at most."""

    statistic: str
    latency: str
    """The field of Latencies."""
    most_ms: float

    @classmethod
    def read(cls, word: str) -> Bound:
        """[STATISTIC_]LATENCY:MS, the statistic P99 when it is left out. Raises ValueError."""
        match = BOUND.fullmatch(word)
        if match is None:
            raise ValueError(
                f"{word!r} must be ttft, tpot, itl or e2el, a colon and milliseconds, such as "
                "ttft:1000 for the P99 or median_tpot:50"
            )
        latency = match["latency"].replace("e2el", "e2e") + "_ms"
        return cls(match["statistic"] or "p99", latency, float(match["most"]))

    @property
    def name(self) -> str:
        """Such as "P99 TTFT"."""
        statistic = self.statistic.upper() if self.statistic[0] == "p" else self.statistic
        return f"{statistic} {self.latency.removesuffix('_ms').upper()}"

    def __str__(self) -> str:
        return f"{self.name} {self.most_ms:g} ms"


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
    find: Literal["max-throughput"] | None = option(
        None,
        "Search the concurrency with most output throughput under --under, between the two of "
        "--concurrency (1,4096 when left out): doubling, then halving the gap.",
        group="Sweep",
    )
    under: str = option(
        "",
        "Bounds of the search in milliseconds, such as ttft:1000,tpot:50: the P99 of ttft, tpot, "
        "itl or e2el, or another statistic as in median_tpot:50.",
        group="Sweep",
    )
    requests_per_slot: int = option(
        4,
        "Random datasets without --num-prompts send this times --concurrency requests at a point, "
        f"{FEWEST_REQUESTS} at least.",
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

    @field_validator("under")
    @classmethod
    def _bounds(cls, text: str) -> str:
        for word in split(text):
            Bound.read(word)
        return _no_twins(text)

    @model_validator(mode="after")
    def _has_points(self) -> BenchSweepConfig:
        given = [name for name in REPLACED if split(getattr(self, name))]
        if not given and self.find is None:
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
    def _can_search(self) -> BenchSweepConfig:
        if self.find is None:
            if self.under:
                raise ValueError("--under bounds a search; give --find max-throughput too")
            return self
        if len(self.concurrencies) not in (0, 2) or self.limits[0] > self.limits[1]:
            raise ValueError(
                "--find searches between two limits; give them in order, as in --concurrency 1,4096"
            )
        for name, is_given in (
            ("--request-rates", bool(self.request_rates)),
            ("--lengths", bool(self.lengths)),
            ("--max-concurrency", self.max_concurrency is not None),
            ("--repeat", self.repeat > 1),
        ):
            if is_given:
                raise ValueError(f"--find varies the concurrency alone; leave {name} out")
        if self.disable_stream and any(bound.latency != "e2e_ms" for bound in self.bounds):
            raise ValueError(
                "--under can only bound e2el without a stream; leave --disable-stream out"
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
    def limits(self) -> tuple[int, int]:
        """Least and most concurrency of a search."""
        low, high = self.concurrencies or LIMITS
        if not self.concurrencies and self.num_prompts is not None:
            high = min(high, self.num_prompts)
        return low, high

    @property
    def bounds(self) -> list[Bound]:
        """`under`, read."""
        return [Bound.read(word) for word in split(self.under)]

    @property
    def has_rate(self) -> bool:
        """At some point at least."""
        return super().has_rate or any(map(math.isfinite, self.rates))

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
