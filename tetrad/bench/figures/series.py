"""A run over time, and how its gaps spread, in few enough numbers to keep with every record."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate

from tetrad.bench.figures.measure import Stamp
from tetrad.core.records import RequestRecord
from tetrad.core.series_records import Histogram, Timeline
from tetrad.core.spread import Spread

MOST_STEPS = 200
LEAST_STEP_S = 0.05
"""Tokens of a decode step come together, so shorter steps would only show that."""
MOST_BINS = 50


def timeline(
    records: Sequence[RequestRecord], stamps: Iterable[Stamp], duration_s: float
) -> Timeline | None:
    """Requests in flight and tokens per second; None for a run that took no time."""
    if duration_s <= 0:
        return None
    step_s = step_of(duration_s)
    num_steps = math.ceil(duration_s / step_s)
    widths = [min(step_s, duration_s - place * step_s) for place in range(num_steps)]
    busy_s = overlaps([(r.sent_s, r.ended_s) for r in records], step_s, num_steps)
    tokens = [0.0] * num_steps
    is_streamed = False
    for time_s, count in stamps:
        is_streamed = True
        tokens[min(int(time_s / step_s), num_steps - 1)] += count
    return Timeline(
        step_s=step_s,
        in_flight=[busy / width for busy, width in zip(busy_s, widths, strict=True)],
        tokens_per_s=[n / w for n, w in zip(tokens, widths, strict=True)] if is_streamed else [],
    )


def step_of(duration_s: float) -> float:
    """The least of 1, 2 and 5 times a power of ten that cuts the run into at most MOST_STEPS, and
    at least LEAST_STEP_S."""
    duration_s = max(duration_s, LEAST_STEP_S * MOST_STEPS)
    power = 10.0 ** math.floor(math.log10(duration_s / MOST_STEPS))
    return next(
        step for step in (power, 2 * power, 5 * power, 10 * power, 20 * power)
        if duration_s / step <= MOST_STEPS
    )  # fmt: skip


def overlaps(spans: Iterable[tuple[float, float]], step_s: float, num_steps: int) -> list[float]:
    """For each step the seconds that all spans (begin, end) together lie in it."""
    partial = [0.0] * num_steps
    whole = [0] * (num_steps + 1)
    for begin_s, end_s in spans:
        first, last = (min(int(t / step_s), num_steps - 1) for t in (begin_s, end_s))
        if first == last:
            partial[first] += end_s - begin_s
            continue
        partial[first] += (first + 1) * step_s - begin_s
        partial[last] += end_s - last * step_s
        whole[first + 1] += 1
        whole[last] -= 1
    return [part + n * step_s for part, n in zip(partial, accumulate(whole[:-1]), strict=True)]


def histogram(values: Sequence[float], spread: Spread) -> Histogram | None:
    """Counts between the least value and the 99th percentile, both from `spread`; None without
    values."""
    if not values:
        return None
    low, high = spread.min, spread.p99
    width = (high - low) / MOST_BINS
    if width <= 0:
        within = sum(value <= high for value in values)
        return Histogram(low=low, high=high, counts=[within], above=len(values) - within)
    counts = [0] * MOST_BINS
    above = 0
    for value in values:
        if value > high:
            above += 1
        else:
            counts[min(int((value - low) / width), MOST_BINS - 1)] += 1
    return Histogram(low=low, high=high, counts=counts, above=above)
