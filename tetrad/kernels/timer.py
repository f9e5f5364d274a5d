"""How long a call takes on a device, and how sure that is.

On a GPU the call is captured in a CUDA graph of its own and the graph is replayed between two
events; before each replay 512 MB are *read*, so that the call finds its inputs in memory and not in
the cache (writing them would leave dirty lines whose write-back the call would pay for). A call
that waits for the device cannot be captured; it is timed with events alone, launch gaps included,
and the result says so. On a CPU a host clock times single calls.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from tetrad.core.records import CallTime
from tetrad.kernels.device import waiting_is_an_error

Call = Callable[[], object]

MIN_REPEATS, MAX_REPEATS = 3, 60
FLUSH_BYTES = 512 << 20
FLUSH_US = 250.0
"""About what a flush and the launches around it take."""
ESTIMATE_REPEATS = 3
SLOW_US = 50_000.0
"""A call that takes longer is not worth more than MIN_REPEATS."""


LONG_S = 1.0
"""A call on a CPU that takes this long varies little."""


class Timer(Protocol):
    """Times calls on one device."""

    cache_bytes: int
    """Inputs smaller than this should come in several sets, which the timer takes in turn."""

    def time(self, calls: Sequence[Call], budget_s: float) -> CallTime:
        """Time `calls` (the same call on different inputs) in turn, for about `budget_s`."""
        ...


def timer_for(device: torch.device) -> Timer:
    """The timer of a "cpu" or "cuda" device."""
    return CudaTimer(device) if device.type == "cuda" else WallTimer()


class WallTimer:
    """A host clock around each call; `clock` counts seconds."""

    cache_bytes = 32 << 20

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def time(self, calls: Sequence[Call], budget_s: float) -> CallTime:
        """Each call runs once before it counts. Where one takes LONG_S and the whole budget, one
        runs before, and one counts."""
        started = self._clock()
        long_s = max(budget_s, LONG_S)
        for call in calls:
            call()
            if self._clock() - started >= long_s:
                break
        samples: list[float] = []
        for call in itertools.cycle(calls):
            begun = self._clock()
            call()
            ended = self._clock()
            samples.append((ended - begun) * 1e6)
            is_late = ended - started >= budget_s
            least = 1 if ended - begun >= long_s else MIN_REPEATS
            if len(samples) >= MAX_REPEATS or (len(samples) >= least and is_late):
                break
        return CallTime.of(samples, "wall")


class CudaTimer:
    """CUDA events around graph replays. Keeps a flush buffer of 512 MB while it lives."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cache_bytes = int(torch.cuda.get_device_properties(device).L2_cache_size)
        self._buffer = torch.ones(FLUSH_BYTES // 4, device=device)
        self._total = torch.empty((), device=device)

    def flush(self) -> None:
        """Read more than any cache holds."""
        torch.sum(self._buffer, dim=0, out=self._total)

    def time(self, calls: Sequence[Call], budget_s: float) -> CallTime:
        """Warm up, capture if that can be, estimate, then measure what the budget allows."""
        with torch.cuda.device(self.device):
            for call in calls:
                call()
            torch.cuda.synchronize()
            graphs, note = _capture_all(calls)
            turn = itertools.cycle([graph.replay for graph in graphs] or calls)
            estimate_us = CallTime.of(self._samples(turn, ESTIMATE_REPEATS), "events").median_us
            samples = self._samples(turn, num_repeats(estimate_us, budget_s))
        if note:
            return CallTime.of(samples, "events", note)
        return CallTime.of(samples, "graph", launches=_num_nodes(graphs[0]))

    def _samples(self, turn: Iterator[Call], num: int) -> list[float]:
        """[num] times in microseconds, each after a flush; waits once, at the end."""
        pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        for call in itertools.islice(turn, num):
            self.flush()
            begin, end = _event(), _event()
            begin.record()
            call()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e3 for begin, end in pairs]


def num_repeats(estimate_us: float, budget_s: float) -> int:
    """How many repeats fit a budget."""
    if estimate_us > SLOW_US:
        return MIN_REPEATS
    fitting = int(budget_s * 1e6 / (estimate_us + FLUSH_US))
    return max(MIN_REPEATS, min(MAX_REPEATS, fitting))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own


def _capture_all(calls: Sequence[Call]) -> tuple[list[torch.cuda.CUDAGraph], str]:
    """A graph of each call, or [] and why not."""
    if waits := _waits(calls[0]):
        return [], waits
    try:
        return [_capture(call) for call in calls], ""
    except RuntimeError as error:
        torch.cuda.synchronize()
        return [], f"could not be captured: {str(error).splitlines()[0]}"


def _waits(call: Call) -> str:
    """A sentence when the call waits for the device, else "". Found out before it is captured,
    because a capture that fails half-way can leave the process in a state where later work fails.
    """
    try:
        with waiting_is_an_error():
            call()
    except RuntimeError as error:
        torch.cuda.synchronize()
        if "synchroniz" not in str(error).lower():
            raise
        return "waits for the device, so launch gaps are included"
    return ""


def _capture(call: Call) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _num_nodes(graph: torch.cuda.CUDAGraph) -> int | None:
    """Asked of the driver, since torch does not tell."""
    number = ctypes.c_size_t()
    try:
        ask = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes
    except (OSError, AttributeError):
        return None
    failed = ask(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(number))
    return None if failed else number.value
