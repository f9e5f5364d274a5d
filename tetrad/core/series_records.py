"""A run over time, and how its values spread."""

from __future__ import annotations

from tetrad.core.spread import Record


class Timeline(Record):
    """A run in equal steps of time; the last one may be shorter."""

    step_s: float
    in_flight: list[float]
    """Mean number of requests under way, of those that finished."""
    tokens_per_s: list[float]
    """Output tokens of successful requests as they arrived; empty without streaming."""


class Histogram(Record):
    """Values counted in equal bins from `low` to `high`, and those above."""

    low: float
    high: float
    counts: list[int]
    above: int
