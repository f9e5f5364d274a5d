"""A load carried by one process or by several; each reads its own answers when the load is over.

Every process has its share of the slots and takes the next request that none has taken, so that the
cap on requests in flight and the order of arrivals are those of the whole load. One process is
this one; several are started afresh, open their connections, and begin at the same instant.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import mmap
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import uvloop

from tetrad.bench.load.backends import Reading, protocol
from tetrad.bench.load.client import Client, Load, LoadResult, Share, run_load
from tetrad.bench.load.judge import read_answer
from tetrad.bench.load.lag import Watched, read_lag_s
from tetrad.bench.load.limits import make_room
from tetrad.bench.load.wire import Trace
from tetrad.core.errors import BenchFailure

KEPT_BYTES_CAP = 512 * 2**20
STREAMS_PER_PROCESS = 1024
"""Half of what one core carried at 50 tokens a second each."""
POLL_S = 0.2
AHEAD_S = 0.05
"""Between the word to begin and the start: every process has heard it by then."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a load process must know."""

    url: str
    headers: dict[str, str]
    timeout_s: float
    backend: str
    stream: bool
    load: Load


@dataclass(slots=True)
class Outcome:
    """What came of a load, read. Bytes are dropped."""

    traces: list[Trace]
    readings: dict[int, Reading]
    """By the index of the request; none for requests that did not finish."""
    duration_s: float
    interrupted: bool
    watched: list[Watched]
    """One for each process."""
    read_lag_s: npt.NDArray[np.float64]
    """How late each event was read, at most."""
    event_lags_s: dict[int, tuple[float, float]]
    """By the index of the request: of its first and last event with tokens."""


@dataclass(slots=True)
class Ledger:
    """Answers as they finish. They are read after the run; early only when they fill the memory."""

    backend: str
    stream: bool
    kept_bytes: int = 0
    readings: dict[int, Reading] = field(default_factory=dict)

    def add(self, trace: Trace) -> None:
        """A request has finished."""
        num_bytes = sum(map(len, trace.reads))
        self.kept_bytes += num_bytes
        if self.kept_bytes > KEPT_BYTES_CAP:
            self.kept_bytes -= num_bytes
            self.read(trace)

    def read(self, trace: Trace) -> None:
        """Find out what an answer says; its bytes are dropped."""
        if trace.index not in self.readings:
            api = protocol(self.backend)
            self.readings[trace.index] = read_answer(trace, api, stream=self.stream)
            trace.reads.clear()
            del trace.stamps[:]


def automatic(slots: int, cores: int) -> int:
    """How many processes carry `slots` requests in flight on a machine with `cores`: half of the
    cores at most, for the server may be on the same machine."""
    return max(1, min(math.ceil(slots / STREAMS_PER_PROCESS), cores // 2))


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


async def perform(job: Job, workers: int | None, on_finished: Callable[[bool], None]) -> Outcome:
    """Carry the load. `on_finished` hears of each request whether it is known to have failed."""
    number = min(workers or automatic(job.load.slots, cores()), job.load.slots)
    make_room(job.load.slots, max(1, number))
    if number <= 1:
        return await _alone(job, None, lambda trace: on_finished(trace.failure is not None))
    with tempfile.TemporaryFile() as file:
        return await Crew(job, number, on_finished, file.fileno()).run()


async def _alone(job: Job, share: Share | None, on_finished: Callable[[Trace], None]) -> Outcome:
    ledger = Ledger(job.backend, job.stream)

    def finished(trace: Trace) -> None:
        ledger.add(trace)
        on_finished(trace)

    client = Client(job.url, job.headers, job.timeout_s)
    return _read(await run_load(client, job.load, finished, share), ledger)


def _read(result: LoadResult, ledger: Ledger) -> Outcome:
    for trace in result.traces:
        if trace.is_finished:
            ledger.read(trace)
    readings, origin = ledger.readings, next((t.origin for t in result.traces), 0.0)
    stamps = [[s + origin for s, _ in r.stamps] for r in readings.values()]
    lags = read_lag_s(result.watched, [stamp for of_one in stamps for stamp in of_one])
    ends = np.cumsum([len(of_one) for of_one in stamps])
    event_lags = {
        index: (float(lags[end - len(of_one)]), float(lags[end - 1]))
        for index, of_one, end in zip(readings, stamps, ends, strict=True)
        if of_one
    }
    return Outcome(
        traces=result.traces,
        readings=readings,
        duration_s=result.duration_s,
        interrupted=result.interrupted,
        watched=[result.watched],
        read_lag_s=lags,
        event_lags_s=event_lags,
    )


# --- Several processes ----------------------------------------------------------------------------


class MappedBodies(Sequence[bytes]):
    """Request bodies in a file that all processes map: no copy for each."""

    def __init__(self, fd: int, ends: list[int]) -> None:
        self._map = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: Any) -> Any:
        return self._map[self._ends[index - 1] if index else 0 : self._ends[index]]


@dataclass(frozen=True, slots=True)
class Post:
    """What is said to a process at its start."""

    job: Job
    """Without bodies."""
    slots: int
    ends: list[int]


class Crew:
    """Load processes and their parent."""

    def __init__(self, job: Job, number: int, on_finished: Callable[[bool], None], fd: int) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._on_finished = on_finished
        self._counts = self._context.Array("q", 3)
        """Openers taken, requests finished, requests failed."""
        self._told = [0, 0]
        ends, at = [], 0
        with os.fdopen(os.dup(fd), "wb") as file:
            for body in job.load.bodies:
                file.write(body)
                ends.append(at := at + len(body))
        empty = dataclasses.replace(job, load=dataclasses.replace(job.load, bodies=()))
        slots = [job.load.slots // number + (i < job.load.slots % number) for i in range(number)]
        self._posts = [Post(empty, share, ends) for share in slots]
        self._path = f"/proc/{os.getpid()}/fd/{fd}"
        self._pipes: list[Pipe] = []

    async def run(self) -> Outcome:
        """Start, begin together, wait."""
        with self._started():
            return await self._directed()

    @contextmanager
    def _started(self) -> Iterator[None]:
        processes = []
        try:
            for post in self._posts:
                here, there = self._context.Pipe()
                process = self._context.Process(
                    target=carry, args=(post, there, self._counts, self._path), daemon=True
                )
                process.start()
                there.close()
                self._pipes.append(here)
                processes.append(process)
            yield
        finally:
            for pipe in self._pipes:
                pipe.close()
            for process in processes:
                process.join(1.0)
                if process.is_alive():
                    process.kill()
                    process.join()

    async def _directed(self) -> Outcome:
        await asyncio.gather(*(asyncio.to_thread(self._heard, pipe) for pipe in self._pipes))
        start = time.perf_counter() + AHEAD_S
        for pipe in self._pipes:
            pipe.send(start)
        waiting = {
            asyncio.create_task(asyncio.to_thread(self._heard, pipe)) for pipe in self._pipes
        }
        done: set[asyncio.Task[Any]] = set()
        pending = waiting
        while pending:
            try:
                finished, pending = await asyncio.wait(pending, timeout=POLL_S)
                done |= finished
            except asyncio.CancelledError:
                for pipe in self._pipes:
                    pipe.send("stop")
                pending = {task for task in waiting if not task.done()}
                done |= waiting - pending
            self._tell()
        return joined([cast(Outcome, task.result()) for task in done])

    def _heard(self, pipe: Pipe) -> Any:
        try:
            return pipe.recv()
        except (EOFError, OSError) as error:
            raise BenchFailure("A load process ended before the load did.") from error

    def _tell(self) -> None:
        _, finished, failed = self._counts[:]
        for has_failed, now, told in ((True, failed, 1), (False, finished - failed, 0)):
            for _ in range(now - self._told[told]):
                self._on_finished(has_failed)
            self._told[told] = now


def carry(post: Post, pipe: Pipe, counts: Any, path: str) -> None:
    """The life of a load process; the parent decides about interrupts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(path, "rb") as file:
        bodies = MappedBodies(file.fileno(), post.ends)
    load = dataclasses.replace(post.job.load, bodies=bodies)
    job = dataclasses.replace(post.job, load=load)
    outcome = uvloop.run(_carry(job, post.slots, pipe, counts))
    # The event loop made the pipe non-blocking.
    os.set_blocking(pipe.fileno(), True)
    pipe.send(outcome)


async def _carry(job: Job, slots: int, pipe: Pipe, counts: Any) -> Outcome:
    openers = job.load.openers
    task = asyncio.current_task()
    assert task is not None

    def take() -> int | None:
        with counts.get_lock():
            place = counts[0]
            counts[0] = place + 1
        return openers[place] if place < len(openers) else None

    def start() -> float:
        pipe.send("ready")
        begun = float(pipe.recv())
        asyncio.get_running_loop().add_reader(pipe.fileno(), task.cancel)
        return begun

    def finished(trace: Trace) -> None:
        with counts.get_lock():
            counts[1] += 1
            counts[2] += trace.failure is not None

    outcome = await _alone(job, Share(slots, take, start), finished)
    asyncio.get_running_loop().remove_reader(pipe.fileno())
    return outcome


def joined(parts: Sequence[Outcome]) -> Outcome:
    """The outcome of the whole load."""
    return Outcome(
        traces=sorted((t for part in parts for t in part.traces), key=lambda trace: trace.index),
        readings={index: r for part in parts for index, r in part.readings.items()},
        duration_s=max(part.duration_s for part in parts),
        interrupted=any(part.interrupted for part in parts),
        watched=[watched for part in parts for watched in part.watched],
        read_lag_s=np.concatenate([part.read_lag_s for part in parts]),
        event_lags_s={i: lags for part in parts for i, lags in part.event_lags_s.items()},
    )
