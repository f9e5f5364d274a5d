"""What `tetrad eval` leaves behind."""

from __future__ import annotations

from typing import Literal

from tetrad.core.records import FailureCount
from tetrad.core.spread import Record


class KindScore(Record):
    """Exact matches on one kind of problem, or on all of them."""

    kind: str
    correct: int
    total: int
    low: float
    high: float
    """Wilson's 95 % interval of the share of right answers."""

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return self.correct / self.total if self.total else 0.0


class Mistake(Record):
    """One problem that was not answered right."""

    kind: str
    question: str
    expected: str
    answer: str


class EvalRun(Record):
    """One run of `tetrad eval`."""

    kind: Literal["eval_run"] = "eval_run"
    schema_version: Literal[1] = 1
    tetrad_version: str
    started_at: str
    """UTC, ISO 8601."""
    model: str | None
    seed: int
    duration_s: float
    kinds: list[KindScore]
    overall: KindScore
    failures: list[FailureCount]
    """Requests without an answer; they count as wrong."""
    mistakes: list[Mistake]
    """The first few."""
