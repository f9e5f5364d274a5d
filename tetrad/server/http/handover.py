"""Requests with large bodies are handed over to the annex, the API process that reads those.

Outside of the whole application: of such a request nothing is read here, only passed on, a piece at
a time and as fast as both sides go. Everything else is served here.

What `Content-Length` says decides. A body that is sent in chunks is collected until it is whole, or
large. Larger ones than the server reads are refused here, by their head.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tetrad.core.errors import CapacityError, TetradError
from tetrad.server.bodies.weight import LARGE_BYTES
from tetrad.server.http.frames import Ask, Gone, Head, Line, Piece, Start
from tetrad.server.requests import BEGAN_AT, RequestDoor
from tetrad.server.service import Service
from tetrad.server.wire.failures import path_of, response_of

WITH_BODY = ("POST", "PUT")
"""Methods of routes that read one."""
PATIENCE_S = 10.0
"""With an annex that does not take a request. It takes one or two to start."""
RETRY_AFTER_S = 5


class HandOver:
    """Wraps the application of an API process."""

    def __init__(self, app: ASGIApp, service: Service, annex: str) -> None:
        """`annex`: the path of its socket."""
        self._app = app
        self._service = service
        self._annex = annex
        self._most_bytes = service.config.max_request_body * 2**20

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] in WITH_BODY:
            headers = Headers(scope=scope)
            if "transfer-encoding" in headers:
                await self._of_chunks(scope, receive, send)
                return
            if LARGE_BYTES < int(headers.get("content-length", "0")) <= self._most_bytes:
                await self._hand_over(scope, receive, send, time.monotonic())
                return
        await self._app(scope, receive, send)

    async def _of_chunks(self, scope: Scope, receive: Receive, send: Send) -> None:
        began_at = time.monotonic()
        first = await _begin(receive)
        is_large = len(first["body"]) > LARGE_BYTES
        collected = iter((first,))

        async def receiving() -> Message:
            return next(collected, None) or await receive()

        if is_large:
            await self._hand_over(scope, receiving, send, began_at)
        else:
            scope["state"][BEGAN_AT] = began_at
            await self._app(scope, receiving, send)

    async def _hand_over(self, scope: Scope, receive: Receive, send: Send, began_at: float) -> None:
        try:
            _ = self._service.engine  # raises why there is none
            await _converse(await _reach(self._annex), _head(scope, began_at), receive, send)
        except TetradError as error:
            await self._refuse(error, scope, receive, send)

    async def _refuse(self, error: TetradError, scope: Scope, receive: Receive, send: Send) -> None:
        async def refusal(scope: Scope, receive: Receive, send: Send) -> None:
            path = path_of(scope)
            self._service.metrics.refused(path)
            await response_of(error, path)(scope, receive, send)

        await RequestDoor(refusal, self._service)(scope, receive, send)


async def _begin(receive: Receive) -> Message:
    """A body up to its end, or until it is large, or its client leaves: that comes next then."""
    content, has_more = bytearray(), True
    while has_more and len(content) <= LARGE_BYTES:
        message = await receive()
        if message["type"] != "http.request":
            break
        content += message["body"]
        has_more = message["more_body"]
    return {"type": "http.request", "body": bytes(content), "more_body": has_more}


async def _reach(annex: str) -> Line:
    """A line to the annex, once it listens. Raises CapacityError."""
    line = None
    try:
        async with asyncio.timeout(PATIENCE_S):
            line = Line(*await asyncio.open_unix_connection(annex))
            await line.hear()
    except BaseException as error:
        if line is not None:
            line.close()
        if not isinstance(error, OSError):  # TimeoutError is one
            raise
        raise CapacityError(
            "The process that reads large bodies is not there yet, or no longer; try again later.",
            retry_after_s=RETRY_AFTER_S,
        ) from None
    return line


def _head(scope: Scope, began_at: float) -> Head:
    return Head(
        began_at,
        scope["http_version"],
        scope["method"],
        scope["scheme"],
        scope["path"],
        scope["raw_path"],
        scope["query_string"],
        list(scope["headers"]),
        scope["client"],
        scope["server"],
    )


async def _converse(line: Line, head: Head, receive: Receive, send: Send) -> None:
    """Pass on what both sides say, until the answer is whole, or the annex has ended it after its
    client left. Raises CapacityError when the annex dies before the answer begins; later nothing
    can be said, and whoever called `send` closes a connection whose answer is not whole."""
    passing: asyncio.Task[bool] | None = None
    has_begun = False
    try:
        await line.say(head)
        while True:
            match await line.hear():
                case Ask():
                    passing = asyncio.create_task(_pass_on(line, receive))
                case Start(status, headers):
                    has_begun = True
                    await send(
                        {"type": "http.response.start", "status": status, "headers": headers}
                    )
                case Piece(content, has_more):
                    await send(
                        {"type": "http.response.body", "body": content, "more_body": has_more}
                    )
                    if not has_more:
                        return
    except ConnectionError:
        has_left = passing is not None and passing.done() and passing.result()
        if not has_begun and not has_left:
            raise CapacityError(
                "The process that read this request has died; try again.",
                retry_after_s=RETRY_AFTER_S,
            ) from None
    finally:
        if passing is not None:
            passing.cancel()
        line.close()


async def _pass_on(line: Line, receive: Receive) -> bool:
    """What comes next from the client; returns whether that is that it has left."""
    message = await receive()
    has_left = bool(message["type"] != "http.request")
    frame = Gone() if has_left else Piece(message["body"], message["more_body"])
    with contextlib.suppress(ConnectionError):
        await line.say(frame)
    return has_left
