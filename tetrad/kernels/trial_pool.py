"""Several processes that take calls of backends from one list, side by side.

Compiling is what a first call takes its time for, and it goes on as many cores as there are. A
process that ends before its time is replaced, and the others go on.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from tetrad.kernels.contract import Case
from tetrad.kernels.device import device_memory
from tetrad.kernels.host import main_memory, usable_processors
from tetrad.kernels.trial_process import COMMAND, Answer, LostError, Process

PATIENCE_S = 300.0
"""For one call. Compiling takes most of it, on a slow machine a minute or two."""
HOST_BYTES = 4 << 30
"""Main memory that a process with torch, CUDA and a compiler may take."""
FREE_SHARE = 0.9
"""Of the device's free memory, what may be in use at once."""


@dataclass(frozen=True, eq=False, slots=True)
class Unit:
    """One call of one backend."""

    op: str
    backend: str
    case: Case
    kind: Literal["canary", "shape"]
    """"canary": a small case with its check. "shape": a case of the served model, just called."""
    tokens: int
    """Of the step; 0 for a canary."""
    num_bytes: int
    """Device memory that it takes at most, about."""
    device: str
    dtype: torch.dtype

    @property
    def pair(self) -> tuple[str, str]:
        """Op and backend."""
        return self.op, self.backend

    @property
    def label(self) -> str:
        """For a person."""
        at = f"at {self.tokens} tokens" if self.tokens else f"in the case '{self.case.name}'"
        return f"{self.op} by {self.backend} {at}"


@dataclass(frozen=True, slots=True)
class Tried:
    """What became of a unit."""

    unit: Unit
    seconds: float
    refusal: str | None = None
    """Of a canary: why the backend cannot be used."""
    lost: LostError | None = None
    """How it took its process with it."""


def num_processes(num_units: int) -> int:
    """Half of the processors, as far as main memory allows; one on a small machine."""
    fitting = main_memory().free_bytes // HOST_BYTES
    return max(1, min(usable_processors() // 2, fitting, num_units))


def room_on(device: str) -> int:
    """Bytes that units may take together."""
    return int(FREE_SHARE * device_memory(torch.device(device)).free_bytes)


class Pool:
    """Runs a list of units once. Iterate over it for what became of each, as they end.

    Units that were not begun within `shapes_s` of the first unit of kind "shape" are left in
    `waiting`, those of a backend that lost its process in `put_off`.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        num: int,
        room: int,
        shapes_s: float,
        command: Sequence[str] = COMMAND,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.waiting = list(units)
        self.put_off: list[Unit] = []
        self.no_process: LostError | None = None
        """Why a process could not be started."""
        self.shapes_began: float | None = None
        self._running: list[Unit] = []
        self._alive: set[Process] = set()
        self._is_stopped = False
        self._num, self._room, self._shapes_s = num, room, shapes_s
        self._command, self._patience_s, self._clock = command, patience_s, clock
        self._changed = threading.Condition()
        self._ended: queue.Queue[Tried | None] = queue.Queue()

    def __iter__(self) -> Iterator[Tried]:
        threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(self._num)]
        for thread in threads:
            thread.start()
        num_left = len(threads)
        try:
            while num_left:
                tried = self._ended.get()
                if tried is None:
                    num_left -= 1
                else:
                    yield tried
        finally:
            self._stop()
            for thread in threads:
                thread.join()

    def _serve(self) -> None:
        """One process after the other, until there is nothing to do."""
        process: Process | None = None
        try:
            while (unit := self._take()) is not None:
                try:
                    process = process or self._started()
                except LostError as error:
                    self._give_back(unit, error)
                    return
                tried = self._try(process, unit)
                if tried.lost is not None:
                    self._end(process)
                    process = None
                self._settle(tried)
                self._ended.put(tried)
        finally:
            if process is not None:
                self._end(process)
            self._ended.put(None)

    def _started(self) -> Process:
        process = Process(self._command)
        with self._changed:
            self._alive.add(process)
            if self._is_stopped:
                process.kill()
        return process

    def _end(self, process: Process) -> None:
        with self._changed:
            self._alive.discard(process)
        process.close()

    def _stop(self) -> None:
        """Begin nothing more, and end what is going on, as when somebody interrupts."""
        with self._changed:
            self._is_stopped = True
            if self._running:
                self.waiting.clear()
            for process in self._alive:
                process.kill()

    def _try(self, process: Process, unit: Unit) -> Tried:
        began = self._clock()
        try:
            answer: Answer = process.ask(unit, self._patience_s, lambda _said: None)
        except LostError as error:
            return Tried(unit, self._clock() - began, lost=error)
        return Tried(unit, self._clock() - began, refusal=answer.get("refusal"))

    def _take(self) -> Unit | None:
        """The first unit that there is room for; waits for room, and None when nothing is left."""
        with self._changed:
            while True:
                due = [unit for unit in self.waiting if self._is_due(unit)]
                if not due:
                    return None
                used = sum(unit.num_bytes for unit in self._running)
                fitting = (unit for unit in due if used + unit.num_bytes <= self._room)
                unit = next(fitting, None if self._running else due[0])
                if unit is not None:
                    self.waiting.remove(unit)
                    self._running.append(unit)
                    if unit.kind == "shape" and self.shapes_began is None:
                        self.shapes_began = self._clock()
                    return unit
                self._changed.wait()

    def _is_due(self, unit: Unit) -> bool:
        if unit.kind == "canary" or self.shapes_began is None:
            return True
        return self._clock() - self.shapes_began < self._shapes_s

    def _settle(self, tried: Tried) -> None:
        with self._changed:
            self._running.remove(tried.unit)
            if tried.lost is not None:
                self.put_off += (each for each in self.waiting if each.pair == tried.unit.pair)
                self.waiting = [each for each in self.waiting if each.pair != tried.unit.pair]
            self._changed.notify_all()

    def _give_back(self, unit: Unit, error: LostError) -> None:
        with self._changed:
            self.no_process = error
            self._running.remove(unit)
            self.waiting.insert(0, unit)
            self._changed.notify_all()
