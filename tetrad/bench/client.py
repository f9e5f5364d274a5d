"""Sends requests and keeps what comes back as bytes with time stamps.

Nothing is parsed while the load runs: a client that is busy decoding stamps the next token late and
calls it the server's fault. Only when the bytes kept pass a limit are finished answers read early.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp

from tetrad.core.records import Failure

READ_BUFFER_BYTES = 10 * 2**20
KEEP_ALIVE_S = 2.0
"""Idle connections are dropped sooner than common servers drop them (5 s), so that no request goes
out on a connection that is just being closed."""


@dataclass(slots=True)
class Trace:
    """One request as the network saw it. Times are seconds since the start of the run."""

    index: int
    due_s: float = 0.0
    sent_s: float = 0.0
    ended_s: float = 0.0
    status: int = 0
    content_type: str = ""
    reads: list[tuple[float, bytes]] = field(default_factory=list)
    failure: Failure | None = None
    """What the transport says; the content is judged later."""
    is_finished: bool = False


@dataclass(frozen=True, slots=True)
class Size:
    """How much of an answer has come."""

    num_bytes: int = 0
    num_lines: int = 0

    @classmethod
    def most(cls, num_tokens: int) -> Size:
        """Far more than any server needs for `num_tokens`: a dozen lines for each and thousands of
        keep-alives, and with each token the whole text so far."""
        return cls(num_bytes=64 * (2**20 + num_tokens**2), num_lines=10_000 + 16 * num_tokens)

    def plus(self, read: bytes) -> Size:
        return Size(self.num_bytes + len(read), self.num_lines + read.count(b"\n"))

    def exceeds(self, most: Size) -> bool:
        return self.num_bytes > most.num_bytes or self.num_lines > most.num_lines

    def __str__(self) -> str:
        return f"{self.num_bytes} bytes in {self.num_lines} lines"


class Client:
    """A keep-alive HTTP client without a cap on connections."""

    def __init__(self, url: str, headers: dict[str, str], timeout_s: float) -> None:
        self.url = url
        self._headers = headers
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """Opened on first use, inside the running loop."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=self._timeout_s, sock_read=self._timeout_s
                ),
                headers=self._headers,
                read_bufsize=READ_BUFFER_BYTES,
            )
        return self._session

    async def close(self) -> None:
        """Drop every connection."""
        if self._session is not None:
            await self._session.close()

    async def post(
        self, path: str, body: bytes, trace: Trace, clock: Callable[[], float], most: Size
    ) -> None:
        """Send one request and read its answer into `trace`; failures are recorded, not raised.
        An answer beyond `most` is cut off. Redirects are not followed: what answers then is not
        what was to be measured."""
        trace.sent_s = clock()
        size = Size()
        try:
            async with self.session.post(
                self.url + path,
                data=body,
                headers={"Content-Type": "application/json"},
                allow_redirects=False,
            ) as answer:
                trace.status = answer.status
                trace.content_type = answer.content_type
                async for read in answer.content.iter_any():
                    trace.reads.append((clock(), read))
                    size = size.plus(read)
                    if size.exceeds(most):
                        trace.failure = Failure(kind="endless", message=f"no end after {size}")
                        break
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            trace.failure = transport_failure(error, answered=trace.status != 0)
        trace.ended_s = clock()
        trace.is_finished = True


def transport_failure(error: Exception, *, answered: bool) -> Failure:
    """Name what went wrong below HTTP. `answered`: a status line had come."""
    message = in_words(error)
    if isinstance(error, TimeoutError):
        return Failure(kind="timeout", message=message)
    if isinstance(error, aiohttp.ClientConnectorError):
        return Failure(kind="refused", message=message)
    if answered:
        return Failure(kind="truncated", message=f"the connection broke: {message}")
    return Failure(kind="disconnected", message=message)


def in_words(error: Exception) -> str:
    """What a transport error says, on one line."""
    if isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error.strerror or str(error.os_error)
        return f"cannot connect to {error.host}:{error.port}: {cause}"
    return " ".join(str(error).split()) or type(error).__name__


@dataclass(frozen=True, slots=True)
class Load:
    """What to send, when, and how many at once."""

    path: str
    bodies: Sequence[bytes]
    due_s: Sequence[float]
    after: Sequence[int | None] = ()
    """For each the index of an earlier one whose end it waits for; its `due_s` counts from then."""
    max_concurrency: int | None = None
    most_tokens: int = 100_000
    """What the longest answer may have."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What came of a load."""

    traces: list[Trace]
    """One per request that became due; after an interrupt some are not finished."""
    duration_s: float
    interrupted: bool


async def run_load(client: Client, load: Load, on_finished: Callable[[Trace], None]) -> LoadResult:
    """Send everything and wait for it. A cancellation ends the load and is reported, not raised."""
    start = time.perf_counter()
    slots = asyncio.Semaphore(load.max_concurrency or max(1, len(load.bodies)))
    traces: list[Trace] = []
    tasks: list[asyncio.Task[None]] = []
    most = Size.most(load.most_tokens)

    def clock() -> float:
        return time.perf_counter() - start

    async def one(trace: Trace) -> None:
        before = load.after[trace.index] if load.after else None
        if before is not None:
            await asyncio.wait([tasks[before]])
            trace.due_s += traces[before].ended_s
            await asyncio.sleep(trace.due_s - clock())
        async with slots:
            await client.post(load.path, load.bodies[trace.index], trace, clock, most)
        on_finished(trace)

    try:
        for index, due_s in enumerate(load.due_s):
            if (wait_s := due_s - clock()) > 0:
                await asyncio.sleep(wait_s)
            traces.append(Trace(index, due_s=due_s))
            tasks.append(asyncio.create_task(one(traces[-1])))
        await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        duration_s = clock()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return LoadResult(traces, duration_s, interrupted=True)
    return LoadResult(traces, clock(), interrupted=False)
