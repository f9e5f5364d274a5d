"""The load generator watches itself: how late it read, how late it sent, how busy it was.

A client that is behind stamps tokens late and calls it the server's fault. Bytes are read in
rounds: the loop wakes, reads every socket that has something, and sleeps again. What was read in a
round had come by its beginning; a round that begins right after the last one was not woken, so its
bytes had been waiting for up to the whole of the last one.
"""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

TICK_S = 0.05
TIMER_RESOLUTION_S = 1e-3
"""Of the loop's timers, which therefore fire up to this late without anybody being busy."""
CPU_PERIOD_S = 1.0
SOCKETS_SAMPLED = 16
NOT_WOKEN_S = 50e-6
"""A round that begins this soon after the last one had its bytes waiting."""
SCHEDULE = Path("/proc/self/schedstat")


@dataclass(slots=True)
class Watched:
    """What one load process saw of itself. Times are `time.perf_counter` seconds."""

    begun: array[float] = field(default_factory=lambda: array("d"))
    ended: array[float] = field(default_factory=lambda: array("d"))
    """Of every round of reads."""
    late_s: array[float] = field(default_factory=lambda: array("d"))
    """How late the loop's timers were, beyond their resolution."""
    unread: array[int] = field(default_factory=lambda: array("q"))
    """Bytes that waited in sampled sockets."""
    busy: array[float] = field(default_factory=lambda: array("d"))
    """Share of a core used, for each second or so."""
    cpu_s: float = 0.0
    waited_s: float = 0.0
    """Ready to run, but another process had the core; 0 where the kernel does not tell."""


class Meter:
    """Fills a `Watched` while the load runs."""

    def __init__(self, sockets: Callable[[], Iterable[int]]) -> None:
        """`sockets` gives file descriptors of connections with an answer under way."""
        self.seen = Watched()
        self.is_in_round = False
        self._sockets = sockets
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._cpu_from = self._cpu_began = time.process_time()
        self._period_from = time.perf_counter()
        self._waited_from = waited_s()

    def begin_round(self, now: float) -> None:
        """The first read after the loop woke; what is called soon runs when all reads are done."""
        self.is_in_round = True
        self.seen.begun.append(now)
        self._loop.call_soon(self._end_round)

    def _end_round(self) -> None:
        self.is_in_round = False
        self.seen.ended.append(time.perf_counter())

    def start(self) -> None:
        """Look every `TICK_S` from now on."""
        self._timer = self._loop.call_later(TICK_S, self._tick, time.perf_counter() + TICK_S)

    def _tick(self, due: float) -> None:
        now = time.perf_counter()
        self.seen.late_s.append(max(0.0, now - due - TIMER_RESOLUTION_S))
        self.seen.unread.extend(unread_bytes(fd) for fd in self._sockets())
        if (period := now - self._period_from) >= CPU_PERIOD_S:
            used = time.process_time()
            self.seen.busy.append((used - self._cpu_from) / period)
            self._cpu_from, self._period_from = used, now
        self.start()

    def stop(self) -> Watched:
        """Look no more, and say what was seen."""
        if self._timer is not None:
            self._timer.cancel()
        if self.is_in_round:
            self._end_round()
        self.seen.cpu_s = time.process_time() - self._cpu_began
        self.seen.waited_s = waited_s() - self._waited_from
        return self.seen


def unread_bytes(fd: int) -> int:
    """Bytes that the kernel holds for a socket."""
    try:
        (waiting,) = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"))
    except OSError:
        return 0
    return int(waiting)


def waited_s() -> float:
    """Seconds that this process was ready and not running, since it began."""
    try:
        return int(SCHEDULE.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def read_lag_s(seen: Watched, stamps: Sequence[float]) -> npt.NDArray[np.float64]:
    """How long ago, at most, the bytes read at each of `stamps` may have come.

    From the beginning of the round, or, when nothing woke the loop for it, from the beginning of
    the last one.
    """
    begun, ended = (np.asarray(t, dtype=np.float64) for t in (seen.begun, seen.ended))
    at = np.asarray(stamps, dtype=np.float64)
    if not len(begun) or not len(at):
        return np.zeros(len(at))
    since = begun.copy()
    was_waiting = begun[1:] - ended[: len(begun) - 1] < NOT_WOKEN_S
    since[1:][was_waiting] = begun[:-1][was_waiting]
    rounds = np.searchsorted(begun, at, side="right") - 1
    lag: npt.NDArray[np.float64] = np.maximum(0.0, at - since[np.maximum(rounds, 0)])
    return lag
