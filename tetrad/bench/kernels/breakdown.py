"""Where a call's time goes: its launches one by one, by the GPU's own profiler."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.profiler import ProfilerActivity, profile

from tetrad.core.records import LaunchTime

RUNS = 5

Seen = tuple[float, str, float]
"""Start, name and duration of a launch, in microseconds."""


def breakdown(call: Callable[[], object], flush: Callable[[], None]) -> list[LaunchTime]:
    """The launches of `call` in order, each with its median time on inputs that are not cached."""
    num_before = len(launches(lambda: _runs(lambda: None, flush))) // RUNS
    return launch_times(launches(lambda: _runs(call, flush)), num_before)


def _runs(call: Callable[[], object], flush: Callable[[], None]) -> None:
    for _ in range(RUNS):
        flush()
        call()


def launches(run: Callable[[], object]) -> list[Seen]:
    """What `run` launches, in order, each from the end of the one before on."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        run()
        torch.cuda.synchronize()
    return one_by_one(
        (event.time_range.start, event.name, event.time_range.elapsed_us())
        for event in seen.events() or ()
        if event.device_type.name == "CUDA"
    )


def one_by_one(seen: Iterable[Seen]) -> list[Seen]:
    """In order. What is placed while the one before ends (`kernels/chain.py`) waits there, and does
    so in the other's time."""
    found: list[Seen] = []
    free_at = -math.inf
    for start, name, us in sorted(seen):
        end = start + us
        found.append((start, name, max(end - max(start, free_at), 0.0)))
        free_at = max(end, free_at)
    return found


def launch_times(seen: Sequence[Seen], num_before: int) -> list[LaunchTime]:
    """Split what was seen into RUNS equal runs and leave out the first `num_before` of each; []
    when they are not equal, as when a call does not do the same each time."""
    if not seen or len(seen) % RUNS:
        return []
    size = len(seen) // RUNS
    runs = [seen[start : start + size] for start in range(0, len(seen), size)]
    columns = list(zip(*runs, strict=True))[num_before:]
    if any(len({name for _, name, _ in column}) > 1 for column in columns):
        return []
    return [
        LaunchTime(name=column[0][1], us=statistics.median(us for _, _, us in column))
        for column in columns
    ]
