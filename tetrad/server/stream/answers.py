"""Responses whose work ends when the client goes away.

Work begins when the response is sent, and nothing is sent before the first piece of the answer is
there: what fails until then still gets its HTTP status.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
)
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tetrad.core.errors import TetradError
from tetrad.server.door.arrival import arrival
from tetrad.server.stream.push import BODY, Outlet
from tetrad.server.wire.encoding import DONE, event, json_pieces
from tetrad.server.wire.failures import body_of
from tetrad.server.wire.pace import in_turn


@dataclass(frozen=True)
class Wire:
    """How an API ends its streams."""

    end: bytes
    """After the last event of a stream that did not break."""
    error: Callable[[TetradError], bytes]
    """The last event of one that did."""


OPENAI = Wire(DONE, lambda error: event(body_of(error)))


PART_BYTES = 1 << 19
"""Of a large answer, and less than twice as much, is written at once."""


class LaterJson(Response):
    """A JSON answer that takes a while."""

    media_type = "application/json"

    def __init__(self, work: Callable[[], Awaitable[Any]]) -> None:
        """`work` gives the JSON value, which may have GrowingLists in it."""
        self._work = work
        super().__init__()

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with in_time():
            value = await self._work()
            pieces = await in_turn(lambda: json_pieces(value))
        left_bytes = sum(map(len, pieces))
        self.headers["content-length"] = str(left_bytes)
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        parts = _parts(pieces)
        while left_bytes:
            part = await in_turn(lambda: next(parts))
            left_bytes -= len(part)
            await send({"type": "http.response.body", "body": part, "more_body": left_bytes > 0})


def _parts(pieces: Iterable[bytes | bytearray]) -> Iterator[bytes]:
    """Small pieces together, large ones in parts."""
    part = bytearray()
    for piece in pieces:
        for begin in range(0, len(piece), PART_BYTES):
            part += memoryview(piece)[begin : begin + PART_BYTES]
            if len(part) >= PART_BYTES:
                yield bytes(part)
                part.clear()
    if part:
        yield bytes(part)


class EventStream(Response):
    """Server-sent events. An error after the first event is an event of its own, the last one."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: Callable[[Outlet | None], AsyncGenerator[bytes, None]],
        wire: Wire = OPENAI,
    ) -> None:
        """`events` gives whole events, as bytes; the wire's end is added. It may write some to the
        outlet it is given instead, while it is waited for."""
        self._events = events
        self._wire = wire
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outlet = scope.get("state", {}).get(BODY)
        await unless_gone(receive, self._send(send, outlet))

    async def _send(self, send: Send, outlet: Outlet | None) -> None:
        has_started = False
        async with contextlib.aclosing(self._events(outlet)) as events:
            try:
                async with in_time():
                    async for piece in events:
                        if not has_started:
                            has_started = True
                            await self._start(send)
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                last = self._wire.end
            except TetradError as error:
                if not has_started:
                    raise
                last = self._wire.error(error)
        await send({"type": "http.response.body", "body": last})

    async def _start(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )


@contextlib.asynccontextmanager
async def in_time() -> AsyncIterator[None]:
    """Raise DeadlineError in the block when the time of the request is up."""
    now = arrival()
    try:
        async with asyncio.timeout(now.seconds_left) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise now.too_late() from None


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, or cancel it when the client disconnects."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    if not task.cancelled():
        task.result()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
