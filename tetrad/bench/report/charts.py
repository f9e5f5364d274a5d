"""What a plot shows, apart from how it is drawn: `svg` writes it into the page, `png` into a
picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

MOST_TICKS = 6


@dataclass(frozen=True, slots=True)
class Curve:
    """A named line through (x, y), ascending in x; broken where y is None."""

    name: str
    points: Sequence[tuple[float, float | None]]
    colour: int = 0
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of values with named places on it."""

    label: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]

    @classmethod
    def of(cls, label: str, low: float, high: float) -> Axis:
        """An axis over numbers, its ticks at round ones."""
        if high <= low:
            high = low + (abs(low) or 1.0)
        step = round_step((high - low) / MOST_TICKS)
        places = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
        return cls(label, low, high, [(n * step, f"{n * step:,.6g}") for n in places])

    @classmethod
    def up_to(cls, label: str, high: float) -> Axis:
        """An axis from 0 to a round number that is not below `high`."""
        high = high if high > 0 else 1.0
        step = round_step(high / MOST_TICKS)
        return cls.of(label, 0.0, max(1, math.ceil(high / step - 1e-9)) * step)

    @classmethod
    def named(cls, label: str, names: Sequence[str]) -> Axis:
        """An axis over words, evenly spaced at 0, 1, 2, ..."""
        return cls(label, -0.5, len(names) - 0.5, list(enumerate(names)))

    def share(self, value: float) -> float:
        """Where a value lies, from 0 to 1."""
        return (value - self.low) / (self.high - self.low)


def round_step(least: float) -> float:
    """The least of 1, 2 and 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(f * power for f in (1, 2, 5, 10, 20) if f * power >= least * (1 - 1e-9))


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves from 0 upwards, or, with `counts`, bars in equal bins over the whole of the axis."""

    title: str
    x: Axis
    y_label: str
    curves: Sequence[Curve] = ()
    counts: Sequence[int] = ()
    has_dots: bool = False
    """Points of their own rather than a course of time."""

    @property
    def y(self) -> Axis:
        """From 0 to a round number that no value is above."""
        drawn = [value for curve in self.curves for _, value in curve.points if value is not None]
        return Axis.up_to(self.y_label, max([*drawn, *self.counts], default=1.0))

    @property
    def bins(self) -> list[tuple[float, float]]:
        """Where each bar begins and ends."""
        width = (self.x.high - self.x.low) / max(1, len(self.counts))
        edges = [self.x.low + n * width for n in range(len(self.counts) + 1)]
        return list(pairwise(edges))
