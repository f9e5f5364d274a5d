"""Connections that keep what comes in as raw bytes with time stamps, and nothing else.

For each read the client does four things: stamp, keep, count the bytes, look whether the answer may
have ended. The head is read once for each answer; bodies stay as they came, framing included, until
the run is over.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import cast

from tetrad.bench.load.http1 import BadAnswerError, Chunks, Head, address, read_head
from tetrad.bench.load.lag import SOCKETS_SAMPLED, Meter
from tetrad.core.records import Failure

KEEP_ALIVE_S = 2.0
"""Idle connections are dropped sooner than common servers drop them (5 s), so that no request goes
out on a connection that is just being closed."""
CONNECTED_AT_ONCE = 64
"""Fewer than the shortest queue of a listening socket in common use (128)."""
LAST_CHUNK = b"\r\n0\r\n\r\n"
END_OF_LINES = b"\r\n\r\n"


@dataclass(slots=True)
class Trace:
    """One request as the network saw it. Times are seconds since the start of the run, but for
    `stamps`."""

    index: int
    due_s: float = 0.0
    ready_s: float = 0.0
    """Due, and below the cap on requests in flight: when it should have been sent."""
    sent_s: float = 0.0
    """On an open connection, or to get one: as clients on aiohttp have it, what a request's own
    connection takes is part of its latencies."""
    ended_s: float = 0.0
    status: int = 0
    content_type: str = ""
    head: Head | None = None
    origin: float = 0.0
    """`time.perf_counter` at the start of the run."""
    stamps: array[float] = field(default_factory=lambda: array("d"))
    """`time.perf_counter` of each read."""
    reads: list[bytes] = field(default_factory=list)
    """As they came: the head, and the framing of chunks."""
    failure: Failure | None = None
    """What the transport says; the content is judged later."""
    is_finished: bool = False

    def parts(self) -> Iterator[tuple[float, bytes]]:
        """(seconds since the start, bytes of the body) of each read. Raises BadAnswerError."""
        if self.head is None:
            return
        chunks = Chunks() if self.head.is_chunked else None
        skip = self.head.num_bytes
        for stamp, read in zip(self.stamps, self.reads, strict=True):
            payload, skip = read[skip:], max(0, skip - len(read))
            if chunks is not None:
                payload = chunks.feed(payload)
            if payload:
                yield stamp - self.origin, payload
        if chunks is not None and not chunks.is_done and self.failure is None:
            raise BadAnswerError("the chunks of the answer have no end")

    def body(self) -> bytes:
        """The whole body. Raises BadAnswerError."""
        return b"".join(part for _, part in self.parts())


@dataclass(frozen=True, slots=True)
class Size:
    """How much of an answer has come."""

    num_bytes: int = 0
    num_lines: int = 0

    @classmethod
    def most(cls, num_tokens: int) -> Size:
        """Far more than any server needs for `num_tokens`: a dozen lines for each and thousands of
        keep-alives, and with each token the whole text so far."""
        return cls(num_bytes=64 * (2**20 + num_tokens**2), num_lines=10_000 + 48 * num_tokens)

    def exceeds(self, most: Size) -> bool:
        return self.num_bytes > most.num_bytes or self.num_lines > most.num_lines

    def __str__(self) -> str:
        return f"{self.num_bytes} bytes in {self.num_lines} lines"


class Connection(asyncio.Protocol):
    """One connection and the answer that it is reading, if any."""

    __slots__ = (
        "_check_at",
        "_chunks",
        "_ends_at",
        "_num_bytes",
        "_num_fed",
        "_num_lines",
        "_pool",
        "idle_since",
        "is_used",
        "trace",
        "transport",
    )

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.trace: Trace | None = None
        self.transport: asyncio.Transport | None = None
        self.idle_since = 0.0
        self.is_used = False
        """An answer has ended on it."""
        self._forget()

    def _forget(self) -> None:
        self._num_bytes = self._num_lines = self._num_fed = 0
        self._check_at = self._pool.most.num_lines
        self._ends_at: int | None = None
        self._chunks = Chunks()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self.transport = cast("asyncio.Transport", transport)

    def send(self, request: bytes, trace: Trace) -> None:
        """Begin a request; `trace` is handed to the pool when its answer has ended."""
        assert self.transport is not None
        self.trace = trace
        self._pool.active.add(self)
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        trace, now = self.trace, time.perf_counter()
        if not self._pool.meter.is_in_round:
            self._pool.meter.begin_round(now)
        if trace is None:  # bytes that nobody asked for
            self.abort()
            return
        trace.stamps.append(now)
        trace.reads.append(data)
        self._num_bytes += len(data)
        try:
            if trace.head is None:
                self._begin(trace)
            elif self._ends_at is None:
                if trace.head.is_chunked and (
                    data.endswith(END_OF_LINES) or len(data) < len(LAST_CHUNK)
                ):
                    self._look_for_end(trace, data)
            elif self._num_bytes >= self._ends_at:
                self.finish()
        except BadAnswerError as error:
            self.fail(Failure(kind="malformed", message=f"not HTTP: {error}"))
        if self._num_bytes > self._check_at:
            self._check_size()

    def _begin(self, trace: Trace) -> None:
        trace.head = head = read_head(b"".join(trace.reads))
        if head is None:
            return
        trace.status, trace.content_type = head.status, head.content_type
        if head.length is not None:
            self._ends_at = head.num_bytes + head.length
            if self._num_bytes >= self._ends_at:
                self.finish()
        elif head.is_chunked:
            self._look_for_end(trace, trace.reads[-1])

    def _look_for_end(self, trace: Trace, data: bytes) -> None:
        """The usual last chunk is known by its bytes; anything that only looks like an end is taken
        apart."""
        if data.endswith(LAST_CHUNK):
            self.finish()
            return
        assert trace.head is not None
        skip = max(0, trace.head.num_bytes - sum(map(len, trace.reads[: self._num_fed])))
        for read in trace.reads[self._num_fed :]:
            self._chunks.feed(read[skip:])
            skip = max(0, skip - len(read))
        self._num_fed = len(trace.reads)
        if self._chunks.is_done:
            self.finish()

    def _check_size(self) -> None:
        trace, most = self.trace, self._pool.most
        if trace is None:
            return
        self._num_lines = sum(read.count(b"\n") for read in trace.reads)
        size = Size(self._num_bytes, self._num_lines)
        if size.exceeds(most):
            self.fail(Failure(kind="endless", message=f"no end after {size}"))
        self._check_at = min(
            most.num_bytes, self._num_bytes + max(2**16, most.num_lines - size.num_lines)
        )

    def finish(self) -> None:
        """The answer is whole."""
        trace = self.trace
        assert trace is not None
        is_kept = trace.head is not None and trace.head.is_kept
        self._end(trace)
        if is_kept:
            self._pool.keep(self)
        else:
            self.abort()
        self._pool.on_end(trace)

    def fail(self, failure: Failure) -> None:
        """The answer is given up."""
        trace = self.trace
        self.abort()
        if trace is not None:
            trace.failure = failure
            self._end(trace)
            self._pool.on_end(trace)

    def _drop(self, trace: Trace) -> None:
        """The server closed a used connection as the next request went out, so it goes again, once,
        on a new one (RFC 9112, section 9.3.1): llama.cpp closes after every stream without saying
        so. A request that fails on a new connection is never sent again."""
        self.trace = None
        self._pool.active.discard(self)
        self._pool.on_dropped(trace)

    def _end(self, trace: Trace) -> None:
        self.is_used = True
        ended = trace.stamps[-1] if trace.stamps and trace.failure is None else time.perf_counter()
        trace.ended_s = ended - trace.origin
        trace.is_finished = True
        self.trace = None
        self._pool.active.discard(self)
        self._forget()

    def abort(self) -> None:
        """Close without waiting."""
        self._pool.forget(self)
        if self.transport is not None:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        trace = self.trace
        if trace is None:
            return
        head = trace.head
        if head is not None and exc is None and not head.is_chunked and head.length is None:
            self.finish()
            return
        why = in_words(exc) if exc is not None else "the server closed it"
        if trace.stamps:
            self.fail(Failure(kind="truncated", message=f"the connection broke: {why}"))
        elif self.is_used:
            self._drop(trace)
        else:
            self.fail(Failure(kind="disconnected", message=why))


def in_words(error: Exception) -> str:
    """What a transport error says, on one line."""
    if isinstance(error, TimeoutError):
        return "it took too long"
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return " ".join(str(error).split()) or type(error).__name__


class Pool:
    """The connections to one server: as many as there are requests in flight, each used again."""

    def __init__(self, url: str, timeout_s: float, most: Size) -> None:
        self.most = most
        self.active: set[Connection] = set()
        self.meter = Meter(self._sampled)
        self.on_end: Callable[[Trace], None] = lambda _: None
        self.on_dropped: Callable[[Trace], None] = lambda _: None
        self._idle: dict[Connection, None] = {}
        self.timeout_s = timeout_s
        self.parts = address(url)
        self._known: str | None = None
        self._tls = ssl.create_default_context() if self.parts.scheme == "https" else None

    @property
    def port(self) -> int:
        return self.parts.port or (443 if self._tls else 80)

    async def connect(self) -> Connection:
        """A new connection. Raises OSError, TimeoutError."""
        host = self.parts.hostname
        assert host is not None
        loop = asyncio.get_running_loop()
        _, connection = await asyncio.wait_for(
            loop.create_connection(
                lambda: Connection(self),
                self._known or host,
                self.port,
                ssl=self._tls,
                server_hostname=host if self._tls else None,
            ),
            self.timeout_s,
        )
        assert connection.transport is not None
        # The address that answered: names are looked up once.
        self._known = connection.transport.get_extra_info("peername")[0]
        return connection

    async def open(self, number: int) -> None:
        """Connections for requests that are about to be due, so that no measured time holds a
        handshake. The first that fails ends it: requests try again, and count their failures."""
        while number > 0:
            batch = min(number, CONNECTED_AT_ONCE)
            number -= batch
            opened = await asyncio.gather(
                *(self.connect() for _ in range(batch)), return_exceptions=True
            )
            for connection in opened:
                if isinstance(connection, Connection):
                    self.keep(connection)
            if any(isinstance(connection, BaseException) for connection in opened):
                return

    def unreachable(self, error: Exception) -> Failure:
        """Why there is no connection."""
        place = f"cannot connect to {self.parts.hostname}:{self.port}"
        message = f"{place}: {in_words(error)}"
        if isinstance(error, TimeoutError):
            return Failure(kind="timeout", message=message)
        return Failure(kind="refused", message=message)

    def take(self) -> Connection | None:
        """An open connection that carries no request; the one used last."""
        while self._idle:
            connection, _ = self._idle.popitem()
            transport = connection.transport
            if transport is not None and not transport.is_closing():
                return connection
        return None

    def keep(self, connection: Connection) -> None:
        """Its answer has ended; it may be used again for `KEEP_ALIVE_S`."""
        connection.idle_since = time.perf_counter()
        self._idle[connection] = None

    def forget(self, connection: Connection) -> None:
        """It is closed."""
        self._idle.pop(connection, None)

    def sweep(self) -> None:
        """End answers without a byte for too long, and connections idle for too long."""
        now = time.perf_counter()
        for connection in list(self.active):
            trace = connection.trace
            assert trace is not None
            last = trace.stamps[-1] if trace.stamps else trace.origin + trace.sent_s
            if now - last > self.timeout_s:
                message = f"no byte from the server for {self.timeout_s:g} s"
                connection.fail(Failure(kind="timeout", message=message))
        while self._idle and now - (oldest := next(iter(self._idle))).idle_since > KEEP_ALIVE_S:
            oldest.abort()

    def _sampled(self) -> Iterator[int]:
        for connection in islice(self.active, SOCKETS_SAMPLED):
            assert connection.transport is not None
            yield connection.transport.get_extra_info("socket").fileno()

    def close(self) -> None:
        """Drop every connection; what they carried is not finished."""
        for connection in [*self.active, *self._idle]:
            connection.trace = None
            connection.abort()
        self.active.clear()
