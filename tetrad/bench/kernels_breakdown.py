"""Where a call's time goes: its launches one by one, by the GPU's own profiler."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
from torch.profiler import ProfilerActivity, profile

from tetrad.core.records import LaunchTime

RUNS = 5

Seen = tuple[float, str, float]
"""Start, name and duration of a launch, in microseconds."""


def breakdown(call: Callable[[], object], flush: Callable[[], None]) -> list[LaunchTime]:
    """The launches of `call` in order, each with its median time on inputs that are not cached."""
    num_before = len(_profile(lambda: None, flush)) // RUNS
    return launch_times(_profile(call, flush), num_before)


def _profile(call: Callable[[], object], flush: Callable[[], None]) -> list[Seen]:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        for _ in range(RUNS):
            flush()
            call()
        torch.cuda.synchronize()
    return sorted(
        (event.time_range.start, event.name, event.time_range.elapsed_us())
        for event in seen.events() or ()
        if event.device_type.name == "CUDA"
    )


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
