"""What `tetrad bench sweep` leaves behind."""

from __future__ import annotations

from typing import Any, Literal

from tetrad.core.records import BenchRun
from tetrad.core.spread import Record

Status = Literal[
    "ok",
    "failures",  # measured, with more failed requests than allowed
    "invalid",  # measured by a client that was late
    "failed",  # no figures at all
]


class Place(Record):
    """Where a point lies: the settings that the sweep varies; None for one that it does not."""

    concurrency: int | None = None
    """Most requests in flight."""
    request_rate: float | Literal["inf"] | None = None
    """Per second."""
    input_len: int | None = None
    output_len: int | None = None
    """Tokens, as --random-input-len and --random-output-len."""
    repetition: int = 1
    """Of --repeat."""

    @property
    def setting(self) -> str:
        """All but the repetition, in words."""
        words = []
        if self.concurrency is not None:
            words.append(f"concurrency {self.concurrency}")
        if self.request_rate is not None:
            words.append(f"rate {self.request_rate}")
        if self.input_len is not None:
            words.append(f"lengths {self.input_len}/{self.output_len}")
        return ", ".join(words)

    def __str__(self) -> str:
        run = f"run {self.repetition}" if self.repetition > 1 else ""
        return ", ".join(filter(None, (self.setting, run)))


class SweepPoint(Record):
    """One point of a sweep, whatever came of it."""

    kind: Literal["sweep_point"] = "sweep_point"
    schema_version: Literal[1] = 1
    tetrad_version: str
    started_at: str
    """UTC, ISO 8601."""
    place: Place
    plan: dict[str, Any]
    """What all points of the sweep share, by the names of the flags."""
    status: Status
    detail: str = ""
    """One sentence for every status but "ok"."""
    run: BenchRun | None = None
