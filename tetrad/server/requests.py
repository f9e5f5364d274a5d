"""The outermost layer: every request gets an id, a time limit, and a line when it is over.

    X-Request-Id        taken when it is printable and short, else made; sent back with the answer
    X-Request-Timeout   seconds it may take
    traceparent         the trace that it is part of

A path below `--root-path` is served whether a proxy has taken that off or not, and with a slash
behind it as without: nobody is sent elsewhere, which a Host header would have a say in.
"""

from __future__ import annotations

import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tetrad.core.errors import RequestError
from tetrad.server.door.arrival import Arrival, begin
from tetrad.server.service import Service
from tetrad.server.stream.push import BODY
from tetrad.server.wire.failures import is_anthropic, path_of, response_of

REQUEST_ID = "X-Request-Id"
ANTHROPIC_REQUEST_ID = "request-id"
"""As Anthropic's clients read it."""
BEGAN_AT = "tetrad.began_at"
"""Where in the state of its scope stands when a request came that was handed over, or waited for
its body."""
LEFT = 499
"""What the access log says, as nginx does, of a client that left before its answer began."""
_ID = re.compile(r"[!-~]{1,128}")


class RequestDoor:
    """Wraps the whole application."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._root = service.config.root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID, "")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        began_at = scope.get("state", {}).get(BEGAN_AT)
        now = Arrival(request_id, self._service.config, began_at)
        now.traceparent = headers.get("traceparent", "")
        begin(now)
        self._find_path(scope)
        status = LEFT

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                sent = MutableHeaders(raw=message["headers"])
                sent[REQUEST_ID] = now.request_id
                if is_anthropic(path_of(scope)):
                    sent[ANTHROPIC_REQUEST_ID] = now.request_id
            await send(message)

        try:
            await self._serve(scope, receive, sending, now, headers.get("x-request-timeout"))
        finally:
            # It knows what answers the request, which knows the scope: a cycle, and what has lived
            # for long the collector hardly ever looks at.
            scope.get("state", {}).pop(BODY, None)
            if now.is_late:
                self._service.metrics.timed_out()
            self._service.reporter.over(scope, now, status, time.monotonic() - now.began_at)

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, now: Arrival, timeout: str | None
    ) -> None:
        try:
            if timeout is not None:
                now.ask_timeout(timeout)
        except RequestError as error:
            await response_of(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _find_path(self, scope: Scope) -> None:
        # Before the keys are looked at, which go by the path.
        scope["path"] = scope["path"].removesuffix("/")
        if self._root:
            scope["root_path"] = self._root
            if not (scope["path"] + "/").startswith(self._root + "/"):
                scope["path"] = self._root + scope["path"]
