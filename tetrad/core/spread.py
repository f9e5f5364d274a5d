"""What every record is made of, and a distribution in nine numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """A frozen model; an unknown key means that a newer version wrote it, and is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear interpolation between closest ranks (numpy's default) of an ascending sequence."""
    place = (len(ordered) - 1) * percent / 100.0
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


class Spread(Record):
    """A distribution in nine numbers. `std` is the population's; all are 0 when `count` is 0."""

    count: int = 0
    mean: float = 0.0
    std: float = 0.0
    min: float = 0.0
    median: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise `values`, in any order."""
        if not values:
            return cls()
        ordered = sorted(values)
        mean = statistics.fmean(ordered)
        return cls(
            count=len(ordered),
            mean=mean,
            # Not statistics.pstdev, whose exact fractions take microseconds for each value.
            std=math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / len(ordered)),
            min=ordered[0],
            median=percentile(ordered, 50),
            p90=percentile(ordered, 90),
            p95=percentile(ordered, 95),
            p99=percentile(ordered, 99),
            max=ordered[-1],
        )
