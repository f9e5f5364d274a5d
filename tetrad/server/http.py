"""HTTP on a bound socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from tetrad.server.app import build_app
from tetrad.server.beat import beat
from tetrad.server.connections import Connection
from tetrad.server.service import Service

KEEP_ALIVE_S = 65
"""Longer than clients and proxies usually keep an idle connection, so that they close it first."""
LAST_BYTES_S = 5
"""How long open responses get to send what they have."""
POLL_S = 0.005


class HttpServer:
    """uvicorn on a bound socket, without its own handling of signals."""

    def __init__(self, service: Service, listener: socket.socket) -> None:
        config = uvicorn.Config(
            build_app(service),
            log_config=None,
            access_log=service.config.log_level == "debug",
            lifespan="off",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            http=Connection,
            ws="none",
            timeout_graceful_shutdown=LAST_BYTES_S,
        )
        self._server = _Uvicorn(config)
        self._beat = asyncio.ensure_future(beat(service.tally))
        self.ended = asyncio.ensure_future(self._server.serve(sockets=[listener]))
        """Done when it serves no more; the result may be an exception."""

    async def listens(self) -> None:
        """Wait until it takes connections, or has failed to."""
        while not (self._server.started or self.ended.done()):
            await asyncio.sleep(POLL_S)

    async def end(self) -> None:
        """Take no more connections, let open responses send their last bytes."""
        self._server.should_exit = True
        try:
            await self.ended
        finally:
            self._beat.cancel()


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
