"""A client's connection, and how long it may keep us waiting.

uvicorn reads headers without end, waits for ever for the rest of a body and for readers that do not
read. Each of these holds a descriptor, memory and, where a request is open, a place in the queue.
Here each has a bound; whoever runs into one is told, where that is possible, and the connection is
closed.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from tetrad.server.http.entrance import Turnstile, is_probe
from tetrad.server.stream.push import BODY
from tetrad.server.wire.encoding import json_bytes
from tetrad.server.wire.failures import error_body

FIRST_BYTE_S = 65.0
"""A new connection may be idle for as long as one between two requests."""
HEAD_S = 10.0
"""From the first byte of a request to the end of its headers."""
MAX_HEAD_BYTES = 65536
"""Of headers, trailers, and what else is not body."""
FRAMING = 16
"""Bytes that may come for each byte of a body that is sent in chunks."""
BODY_S = 20.0
BODY_BYTES_PER_S = 65536
"""A body may pause for so long, and take so long and what it needs at this rate in all."""
REST_S = 5.0
"""What is still sent of a body after its answer is read for so long: a client whose bytes are
refused by the system may not read the answer."""
READER_S = 60.0
READER_BYTES = 4096
"""In so long a reader must take so much of what waits for it, or all."""
RETRY_AFTER_S = 30


class Body:
    """The body of an answer, for pieces that need not pass the application: an `Outlet`."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        """Of the request that `cycle` answers."""
        self._cycle = cycle

    @property
    def is_open(self) -> bool:
        """Whether the answer is in parts, has begun and has not ended, and its client reads."""
        cycle = self._cycle
        return bool(
            cycle.chunked_encoding
            and not cycle.response_complete
            and not cycle.disconnected
            and not cycle.flow.write_paused
        )

    def write(self, piece: bytes) -> None:
        """Send a piece, as the application would."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))


class Connection(HttpToolsProtocol):
    """One connection."""

    def __init__(
        self, *arguments: Any, turnstile: Turnstile, exits: Turnstile, **named: Any
    ) -> None:
        """Requests of all connections come in by `turnstile`; by `exits` those go whose client has
        left."""
        super().__init__(*arguments, **named)
        self._turnstile = turnstile
        self._exits = exits
        self._answered: RequestResponseCycle | None = None
        """The request that is being answered, or was last; `cycle` is the last that was read."""
        self._held: list[bytes] = []
        """What has come of a request that may not come in yet."""
        self._is_in_line = False
        self._is_in_head = True
        self._has_begun = False
        """Whether the next request's first byte is here."""
        self._request_bytes = self._body_bytes = 0
        self._body_began_at = self._body_grew_at = 0.0
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first byte has some time."""
        super().connection_made(transport)
        self._wait(FIRST_BYTE_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more, and nothing written. To end what it asked for takes a
        while, and many may leave at once."""
        self._wait(None)
        self._has_read()
        self.connections.discard(self)
        self.pipeline.clear()
        if cycle := self._unanswered:
            cycle.disconnected = True
        self._exits.let_in(partial(self._leave, exc))

    def _leave(self, exc: Exception | None) -> None:
        if self._answered is not None:
            self._answered.message_event.set()
        self._unset_keepalive_if_required()  # or uvicorn's timer holds all of it for a minute
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take it, unless it begins a request and many others begin."""
        if self._held:
            self._held.append(data)
        elif self._has_begun or not self._is_in_head or is_probe(data):
            self._take(data)
        else:
            self._held.append(data)
            self._is_in_line = not self._turnstile.let_in(self._come_in)
            if self._is_in_line:
                self.flow.pause_reading()

    def _come_in(self) -> None:
        data, self._held = b"".join(self._held), []
        if self._is_closing:
            return
        if self._is_in_line:
            self._is_in_line = False
            self.flow.resume_reading()
        self._take(data)

    def _take(self, data: bytes) -> None:
        """Parse, and look at what has come besides bodies."""
        self._request_bytes += len(data)
        self._unset_keepalive_if_required()
        self._parse(data)
        others = self._request_bytes - self._body_bytes
        if others > MAX_HEAD_BYTES + FRAMING * self._body_bytes and not self._is_closing:
            self._refuse(431, f"The headers are larger than {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        """The headers have some time."""
        super().on_message_begin()
        self._has_begun = True
        self._wait(HEAD_S)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        cycle.scope["state"][BODY] = Body(cycle)
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Trailers are not read: they come when the headers have been judged."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The body has some time."""
        if self._asks_for_upgrade:
            return
        self._is_in_head = False
        self._body_began_at = self._body_grew_at = time.monotonic()
        self._wait(BODY_S)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """What has come buys time for the rest."""
        self._body_bytes += len(body)
        self._body_grew_at = time.monotonic()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole; the next one has not begun."""
        if self._asks_for_upgrade:
            return
        self._is_in_head, self._has_begun = True, False
        self._request_bytes = self._body_bytes = 0
        self._wait(None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Some send on although they have their answer."""
        super().on_response_complete()
        if not self._is_in_head and self.cycle.response_complete and not self._is_closing:
            self._wait(REST_S)

    def pause_writing(self) -> None:
        """The client does not read: it may, for a while."""
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        """It has read something."""
        self._has_read()
        super().resume_writing()

    def shutdown(self) -> None:
        """The server ends: whole requests are answered, others are not waited for."""
        if self._is_closing:
            return
        cycle = self._unanswered
        if cycle is not None and cycle is not self.cycle:
            cycle.keep_alive = False  # others stand behind it
        elif self.cycle is not None and not self._is_in_head and not self.cycle.response_started:
            self._refuse(
                503,
                "The server is shutting down and takes no new requests.",
                f"retry-after: {RETRY_AFTER_S}\r\n",
            )
        else:
            super().shutdown()

    @property
    def _unanswered(self) -> RequestResponseCycle | None:
        """The request whose answer is not complete, the first if there are several."""
        cycle = self._answered
        return None if cycle is None or cycle.response_complete else cycle

    @property
    def _is_closing(self) -> bool:
        return self.transport.is_closing()

    @property
    def _asks_for_upgrade(self) -> bool:
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._asks_for_upgrade:
                self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(400, "This is no HTTP/1.1 request that can be read.")

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Go on as if the client, such as Java's, had not asked for another protocol: the parser
        has dropped the body of such a request."""
        head = [b"%s %s HTTP/1.1\r\n" % (self.parser.get_method(), self.url)]
        for name, value in self.headers:
            if name == b"connection":
                value = b",".join(t for t in value.split(b",") if t.strip().lower() != b"upgrade")
            if name != b"upgrade":
                head.append(b"%s: %s\r\n" % (name, value))
        self.parser = httptools.HttpRequestParser(self)
        self._parse(b"".join(head) + b"\r\n" + rest)

    def _has_read(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _wait_for_reader(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        self._writing = self.loop.call_later(READER_S, self._late_reader, waiting)

    def _late_reader(self, waited: int) -> None:
        if self.transport.get_write_buffer_size() > waited - READER_BYTES:
            self.transport.abort()
        else:
            self._wait_for_reader()

    def _wait(self, most_s: float | None) -> None:
        """What the client sends next may take so long."""
        if self._reading is not None:
            self._reading.cancel()
        self._reading = None if most_s is None else self.loop.call_later(most_s, self._late)

    def _late(self) -> None:
        if self._is_closing:
            return
        if self._is_in_head and self._has_begun:
            self._refuse(408, f"The headers took longer than {HEAD_S:g} s.")
        elif self._is_in_head or self.cycle.response_started:
            self.transport.close()
        else:
            self._late_body()

    def _late_body(self) -> None:
        now = time.monotonic()
        took_s = now - self._body_began_at
        left_s = min(
            BODY_S + self._body_bytes / BODY_BYTES_PER_S - took_s,
            self._body_grew_at + BODY_S - now,
        )
        if self.flow.read_paused:
            left_s = BODY_S  # it is us who do not read
        if left_s > 0:
            self._wait(left_s)
        else:
            self._refuse(408, f"The body is too slow: {self._body_bytes} bytes in {took_s:.0f} s.")

    def _refuse(self, status: int, message: str, headers: str = "") -> None:
        """Answer in place of the application, unless it has begun to, and close."""
        cycle = self._answered
        if cycle is None or cycle.response_complete or not cycle.response_started:
            body = json_bytes(error_body(message, status))
            head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n{headers}"
            end = b"connection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head.encode() + end + body)
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()
