"""The concurrency at which a server gives most while its latencies keep bounds.

The next point follows from the points there are, so a search that was interrupted goes on where it
was: doubling until a bound breaks or throughput stands still, then halving the gap, by ratio.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tetrad.bench.sweep import run as sweep
from tetrad.bench.sweep.options import BenchSweepConfig, Bound
from tetrad.core.errors import BenchFailure
from tetrad.core.records import BenchRun
from tetrad.core.sweep_records import Place, SweepPoint

STANDSTILL = 1.02
"""Less than this factor in throughput for twice the concurrency is none."""
CLOSE = 0.05
"""A gap of this share of the concurrency is not halved any more."""


@dataclass(frozen=True, slots=True)
class Score:
    """What the search asks of a point."""

    is_good: bool
    """Requests succeeded and every bound was kept."""
    output_throughput: float


def score(point: SweepPoint, bounds: Sequence[Bound]) -> Score:
    """Judge a point that has figures."""
    assert point.run is not None
    is_good = point.status == "ok" and not broken(point.run, bounds)
    return Score(is_good, point.run.output_throughput)


def broken(run: BenchRun, bounds: Sequence[Bound]) -> list[str]:
    """Each bound that the run did not keep, with what was measured."""
    values = [(bound, value_of(run, bound)) for bound in bounds]
    return [
        f"{bound.name} is {value:.1f} ms"
        for bound, value in values
        if value is not None and value > bound.most_ms
    ]


def value_of(run: BenchRun, bound: Bound) -> float | None:
    """The figure that is bounded, in ms; None where the run cannot have it."""
    spread = getattr(run.latencies, bound.latency)
    return getattr(spread, bound.statistic) if spread is not None and spread.count else None


def next_count(tried: Mapping[int, Score], low: int, high: int) -> int | None:
    """The concurrency to try after these; None when the search is over."""
    if low not in tried:
        return low
    first_bad = min((count for count, each in tried.items() if not each.is_good), default=None)
    good = sorted(c for c in tried if first_bad is None or c < first_bad)
    if not good:
        return None
    best = good[-1]
    if first_bad is None:
        rates = [tried[count].output_throughput for count in good[-2:]]
        stands_still = len(rates) == 2 and rates[1] < STANDSTILL * rates[0]
        return None if best >= high or stands_still else min(2 * best, high)
    if first_bad - best <= max(1, CLOSE * best):
        return None
    return min(max(round(math.sqrt(best * first_bad)), best + 1), first_bad - 1)


def search(
    config: BenchSweepConfig,
    found: Mapping[Place, SweepPoint],
    plan: dict[str, Any],
    measure: sweep.Measure,
    say: Callable[[str], None],
) -> Iterator[SweepPoint]:
    """Points in the order they are tried, those of `found` as they are. It ends early at a point
    whose figures say nothing about the server: none, or those of a client that was late."""
    low, high = config.limits
    tried: dict[int, Score] = {}
    while (count := next_count(tried, low, high)) is not None:
        todo = sweep.todo_at(config, count)
        kept = found.get(todo.place)
        say(f"search: {todo.place}" + (", measured before" if kept is not None else ""))
        point = kept if kept is not None else sweep.measured(todo, plan, measure)
        yield point
        if point.run is None or point.status == "invalid":
            return
        tried[count] = score(point, config.bounds)


def conclusion(points: Sequence[SweepPoint], bounds: Sequence[Bound]) -> str:
    """What was found, in a sentence. Raises BenchFailure when nothing was."""
    stopped = next((p for p in points if p.run is None or p.status == "invalid"), None)
    if stopped is not None:
        raise BenchFailure(f"The search ended at {stopped.place}: {stopped.detail}")
    runs = {point.place: point.run for point in points if point.run is not None}
    good = [point.place for point in points if score(point, bounds).is_good]
    under = ", ".join(str(bound) for bound in bounds) or "no bound"
    if not good:
        first = points[0]
        why = first.detail or "; ".join(broken(runs[first.place], bounds))
        raise BenchFailure(f"No concurrency keeps {under}: at {first.place} {why}.")
    best = max(good, key=lambda place: runs[place].output_throughput)
    above = [p for p in points if p.place not in good]
    nearest = min(above, key=lambda point: point.place.concurrency or 0, default=None)
    end = ""
    if nearest is not None:
        why = nearest.detail or "; ".join(broken(runs[nearest.place], bounds))
        end = f" At {nearest.place}: {why.rstrip('.')}."
    return (
        f"Most output throughput under {under}: {runs[best].output_throughput:,.1f} tok/s at "
        f"{best}.{end}"
    )
