"""Sends requests when they are due and keeps what comes back as bytes with time stamps.

Nothing is parsed while the load runs: a client that is busy decoding stamps the next token late and
calls it the server's fault. Only when the bytes kept pass a limit are finished answers read early.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp

from tetrad.bench.load.http1 import request_head, with_body
from tetrad.bench.load.lag import Watched
from tetrad.bench.load.wire import Pool, Size, Trace
from tetrad.bench.load.wire import in_words as transport_words

READ_BUFFER_BYTES = 10 * 2**20
SENT_AT_ONCE = 16
"""Requests written before the loop may read again."""
EARLY_S = 0.5e-3
"""Half the resolution of the loop's timers: a request due this soon is sent now."""
SWEEP_S = 0.5
OPENED_AHEAD_S = 1.0
"""Requests due this soon after the start find their connections open."""


class Client:
    """Where the server is and how it is spoken to; the requests beside the load go through
    `session`."""

    def __init__(self, url: str, headers: dict[str, str], timeout_s: float) -> None:
        self.url = url
        self.headers = headers
        self.timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """Opened on first use, inside the running loop."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=self.timeout_s, sock_read=self.timeout_s
                ),
                headers=self.headers,
                read_bufsize=READ_BUFFER_BYTES,
            )
        return self._session

    async def close(self) -> None:
        """Drop every connection."""
        if self._session is not None:
            await self._session.close()


def in_words(error: Exception) -> str:
    """What a transport error says, on one line."""
    if isinstance(error, aiohttp.ClientConnectorError):
        found = error.os_error
        # Of a name that is not known the number is no error of the system's.
        cause = transport_words(found) if (found.errno or 0) > 0 else found.strerror or str(found)
        return f"cannot connect to {error.host}:{error.port}: {cause}"
    return transport_words(error)


@dataclass(frozen=True, slots=True)
class Load:
    """What to send, when, and how many at once."""

    path: str
    bodies: Sequence[bytes]
    due_s: Sequence[float]
    """Ascending."""
    after: Sequence[int | None] = ()
    """For each the index of an earlier one whose end it waits for; its `due_s` counts from then."""
    max_concurrency: int | None = None
    most_tokens: int = 100_000
    """What the longest answer may have."""

    @property
    def slots(self) -> int:
        """Most requests in flight."""
        return min(self.max_concurrency or len(self.bodies), len(self.bodies))

    @property
    def openers(self) -> list[int]:
        """Indices of the requests that wait for no other's end."""
        if not self.after:
            return list(range(len(self.bodies)))
        return [index for index, before in enumerate(self.after) if before is None]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What came of a load."""

    traces: list[Trace]
    """One per request that became due; after an interrupt some are not finished."""
    duration_s: float
    interrupted: bool
    watched: Watched = field(default_factory=Watched)


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a load that one process carries."""

    slots: int
    take: Callable[[], int | None]
    """Index of the next opener that no process has taken; None when there is none."""
    start: Callable[[], float]
    """Called when everything is ready; gives the `time.perf_counter` at which the run starts."""

    @classmethod
    def whole(cls, load: Load) -> Share:
        """All of it."""
        indices = itertools.chain(load.openers, itertools.repeat(None))
        return cls(load.slots, lambda: next(indices), time.perf_counter)


async def run_load(
    client: Client, load: Load, on_finished: Callable[[Trace], None], share: Share | None = None
) -> LoadResult:
    """Send everything and wait for it. A cancellation ends the load and is reported, not raised."""
    share = share or Share.whole(load)
    pool = Pool(client.url, client.timeout_s, Size.most(load.most_tokens))
    sender = Sender(pool, load, share, client.headers, on_finished)
    try:
        soon = sum(load.due_s[index] <= OPENED_AHEAD_S for index in load.openers)
        await pool.open(min(share.slots, soon))
        # What is here stays; the collector's pauses would be the server's.
        gc.freeze()
        gc.disable()
        await sender.run()
    except asyncio.CancelledError:
        return sender.result(interrupted=True)
    finally:
        gc.enable()
        gc.unfreeze()
        pool.close()
    return sender.result(interrupted=False)


class Sender:
    """Gives each due request a connection, at most `share.slots` at once.

    One opener at a time is taken from the others' reach, and only when a slot is free.
    """

    def __init__(
        self,
        pool: Pool,
        load: Load,
        share: Share,
        headers: dict[str, str],
        on_finished: Callable[[Trace], None],
    ) -> None:
        self._pool, self._load, self._share = pool, load, share
        self._on_finished = on_finished
        self._head = request_head(pool.parts, load.path, headers)
        self._loop = asyncio.get_running_loop()
        self._traces: list[Trace] = []
        self._free = share.slots
        self._free_since_s = 0.0
        self._opener: int | None = None
        self._due: list[tuple[float, int]] = []
        """A heap of (seconds after the start, index): the opener taken, and followers whose
        forerunner has ended."""
        self._followers: dict[int, list[int]] = {}
        for index, before in enumerate(load.after):
            if before is not None:
                self._followers.setdefault(before, []).append(index)
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False
        self._origin = time.perf_counter()
        self._ended = self._origin
        self._done = asyncio.Event()
        self._connecting: set[asyncio.Task[None]] = set()
        pool.on_end = self._on_end
        pool.on_dropped = self._send_anew

    async def run(self) -> None:
        """Until every answer has ended."""
        self._origin = self._share.start()
        if (wait_s := self._origin - time.perf_counter()) > 0:
            await asyncio.sleep(wait_s)
        self._pool.meter.start()
        sweeps = asyncio.create_task(self._sweep())
        try:
            self._pump()
            await self._done.wait()
        finally:
            self._ended = time.perf_counter()
            self._is_over = True
            self._pool.meter.stop()
            sweeps.cancel()
            for task in self._connecting:
                task.cancel()

    def result(self, *, interrupted: bool) -> LoadResult:
        """What there is, finished or not."""
        watched = self._pool.meter.seen
        self._traces.sort(key=lambda trace: trace.index)
        return LoadResult(self._traces, self._ended - self._origin, interrupted, watched)

    def _pump(self) -> None:
        """Send what is due; come back when the next is, or when an answer ends."""
        for _ in range(SENT_AT_ONCE):
            if self._is_over or not self._free:
                return
            if self._opener is None and (index := self._share.take()) is not None:
                self._opener = index
                heapq.heappush(self._due, (self._load.due_s[index], index))
            if not self._due:
                self._look_whether_done()
                return
            due_s, index = self._due[0]
            if (wait_s := due_s - (time.perf_counter() - self._origin)) > EARLY_S:
                self._wake_in(wait_s)
                return
            heapq.heappop(self._due)
            if index == self._opener:
                self._opener = None
            self._launch(index, due_s)
        self._loop.call_soon(self._pump)

    def _wake_in(self, wait_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(wait_s, self._pump)

    def _launch(self, index: int, due_s: float) -> None:
        ready_s = max(due_s, self._free_since_s)
        sent_s = time.perf_counter() - self._origin
        trace = Trace(index, due_s=due_s, ready_s=ready_s, sent_s=sent_s, origin=self._origin)
        self._traces.append(trace)
        self._free -= 1
        connection = self._pool.take()
        if connection is not None:
            connection.send(with_body(self._head, self._load.bodies[index]), trace)
            return
        self._send_anew(trace)

    def _send_anew(self, trace: Trace) -> None:
        """On a connection of its own."""
        task = asyncio.create_task(self._connect(trace))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, trace: Trace) -> None:
        try:
            connection = await self._pool.connect()
        except (OSError, TimeoutError) as error:
            trace.failure = self._pool.unreachable(error)
            trace.ended_s = time.perf_counter() - self._origin
            trace.is_finished = True
            self._on_end(trace)
            return
        connection.send(with_body(self._head, self._load.bodies[trace.index]), trace)

    def _on_end(self, trace: Trace) -> None:
        self._on_finished(trace)
        # Until now every slot was taken: the next request could not have gone sooner.
        if not self._free:
            self._free_since_s = trace.ended_s
        self._free += 1
        for index in self._followers.get(trace.index, ()):
            heapq.heappush(self._due, (trace.ended_s + self._load.due_s[index], index))
        self._pump()

    def _look_whether_done(self) -> None:
        if self._free == self._share.slots:
            self._done.set()

    async def _sweep(self) -> None:
        period_s = min(SWEEP_S, self._pool.timeout_s / 4)
        while True:
            await asyncio.sleep(period_s)
            self._pool.sweep()
