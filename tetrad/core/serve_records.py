"""What a load is measured by besides SGLang's figures; `tetrad/bench/figures/definitions.py` has
the formulas."""

from __future__ import annotations

from typing import Literal

from tetrad.core.spread import Record, Spread


class Further(Record):
    """Of the successful requests, in milliseconds."""

    itl_chunk_ms: Spread | None = None
    """Gaps between events, however many tokens they bring; None without streaming."""
    ttat_ms: Spread | None = None
    """Time to the first token of the answer, of requests that reasoned before it."""
    normalised_ms: Spread
    """End-to-end latency for each output token."""
    mean_in_flight: float
    """True mean over the run, failures included."""


class Steady(Record):
    """The part of a run in which the server was as busy as it got. Times are seconds since the
    start of the run."""

    begun_s: float
    ended_s: float
    completed: int
    """Requests that ended in it."""
    output_tokens: int
    output_throughput: float
    """Tokens that came in it, per second of it."""
    mean_in_flight: float
    ttft_ms: Spread
    """Of requests sent in it."""
    tpot_ms: Spread
    """Of requests that ended in it."""


class Figure(Record):
    """One figure over the repetitions of a run."""

    name: str
    values: list[float]
    median: float
    low: float
    high: float
    """Bootstrap's 95 % interval of the median."""
    spread: float
    """(largest - smallest) / median; 0 when the median is 0."""


class Repeats(Record):
    """A run several times over, with fresh prompts each time."""

    kind: Literal["bench_repeats"] = "bench_repeats"
    schema_version: Literal[1] = 1
    num_runs: int
    figures: list[Figure]


class Difference(Record):
    """One figure of two servers."""

    name: str
    median_a: float
    median_b: float
    ratio: float
    """Geometric mean of B/A over the pairs."""
    low: float
    high: float
    """Student's 95 % interval of it."""

    @property
    def is_significant(self) -> bool:
        """Whether the interval leaves 1 out."""
        return not self.low <= 1.0 <= self.high


class Comparison(Record):
    """Two servers under the same load in turns."""

    kind: Literal["bench_comparison"] = "bench_comparison"
    schema_version: Literal[1] = 1
    num_pairs: int
    differences: list[Difference]
