"""The API process that reads large bodies, and the socket at which others hand them over.

To validate 30 MB takes a third of a second in which nothing else of a process runs. So the process
that took a request with such a body does not read it (`http/handover.py`): this one does, by the
very same application, and whoever asks the others how the server is waits for none of it.

    client ── API process ── Unix socket, `http/frames` ── annex ── engine

It is started, watched and ended like every other, with two differences: it takes no connections
from clients, and nobody waits for it when the server starts. Its listening socket belongs to the
first process. So who comes while the annex starts, or is started anew, stands in line there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
from collections.abc import Iterator

from starlette.types import Message, Scope

from tetrad.engine.client import private_folder
from tetrad.server.app import build_app
from tetrad.server.http.frames import Ask, Head, Line, Piece, Ready, Start
from tetrad.server.http.server import LAST_BYTES_S
from tetrad.server.requests import BEGAN_AT
from tetrad.server.service import Service
from tetrad.server.shared.beat import beat

BACKLOG = 2048
PIECE_BYTES = 1 << 16
"""Of an answer, sent at once: whoever passes it on does not copy megabytes."""
_log = logging.getLogger(__name__)


def is_possible() -> bool:
    """Whether this system lets processes share the tables that they need."""
    return hasattr(os, "memfd_create")


@contextlib.contextmanager
def listening(has_annex: bool) -> Iterator[socket.socket | None]:
    """A socket that only processes of this user can reach, if there is to be an annex."""
    if not has_annex:
        yield None
        return
    folder = private_folder()
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/annex")
            listener.listen(BACKLOG)
            yield listener
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class AnnexServer:
    """Serves what is handed over; for a worker the same as an `HttpServer`."""

    def __init__(self, service: Service, listener: socket.socket) -> None:
        self._app = build_app(service)
        self._listener = listener
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()
        self._beat = asyncio.ensure_future(beat(service.tally))
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when it serves no more."""

    async def listens(self) -> None:
        """Begin to serve."""
        self._listener.setblocking(False)
        self._server = await asyncio.start_unix_server(
            self._serve, sock=self._listener, backlog=BACKLOG
        )

    async def end(self) -> None:
        """Take no more requests, let open responses send their last bytes."""
        if self._server is not None:
            self._server.close()
        if self._open:
            await asyncio.wait(self._open, timeout=LAST_BYTES_S)
        for task in self._open:
            task.cancel()
        self._beat.cancel()
        if not self.ended.done():
            self.ended.set_result(None)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        line = Line(reader, writer)
        try:
            await line.say(Ready())
            head = await line.hear()
            assert isinstance(head, Head)
            talk = _Talk(line)
            await self._app(_scope(head), talk.receive, talk.send)
        except ConnectionError:
            pass  # it was given up before it was begun
        except Exception:  # noqa: BLE001 - a bug, of one request
            _log.exception("A request that was handed over failed.")
        finally:
            self._open.discard(task)
            line.close()


def _scope(head: Head) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": head.http_version,
        "method": head.method,
        "scheme": head.scheme,
        "path": head.path,
        "raw_path": head.raw_path,
        "query_string": head.query_string,
        "root_path": "",
        "headers": head.headers,
        "client": head.client,
        "server": head.server,
        "state": {BEGAN_AT: head.began_at},
    }


class _Talk:
    """The application's side of one request."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._has_asked = False

    async def receive(self) -> Message:
        try:
            if not self._has_asked:
                self._has_asked = True
                await self._line.say(Ask())
            told = await self._line.hear()
        except ConnectionError:
            return {"type": "http.disconnect"}
        self._has_asked = False
        if isinstance(told, Piece):
            return {"type": "http.request", "body": told.content, "more_body": told.has_more}
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """To nobody, if the client has left or its process has died: `receive` tells of it."""
        with contextlib.suppress(ConnectionError):
            if message["type"] == "http.response.start":
                await self._line.say(Start(message["status"], list(message["headers"])))
            else:
                await self._send_body(message.get("body", b""), message.get("more_body", False))

    async def _send_body(self, content: bytes, has_more: bool) -> None:
        begin = 0
        while len(content) - begin > PIECE_BYTES:
            await self._line.say(Piece(content[begin : begin + PIECE_BYTES], has_more=True))
            begin += PIECE_BYTES
        await self._line.say(Piece(content[begin:], has_more))
