"""HTTP on a bound socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from tetrad.core.config import ServeConfig
from tetrad.core.errors import ConfigError, unreadable
from tetrad.server.app import build_app
from tetrad.server.http.connections import Connection
from tetrad.server.http.entrance import EXITS_A_TURN, REQUESTS_A_TURN, Entrance, Turnstile
from tetrad.server.http.handover import HandOver
from tetrad.server.service import Service
from tetrad.server.shared.beat import beat

KEEP_ALIVE_S = 65
"""Longer than clients and proxies usually keep an idle connection, so that they close it first."""
LAST_BYTES_S = 5
"""How long open responses get to send what they have."""
POLL_S = 0.005


class HttpServer:
    """uvicorn on a bound socket, without its own handling of signals."""

    def __init__(self, service: Service, listener: socket.socket, annex: str = "") -> None:
        """`annex`: where requests with large bodies are handed over; served here if nowhere."""
        app = build_app(service)
        config = uvicorn.Config(
            HandOver(app, service, annex) if annex else app,
            log_config=None,
            access_log=False,  # the server has its own, which shows no query
            lifespan="off",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            http=Connection,
            ws="none",
            timeout_graceful_shutdown=LAST_BYTES_S,
            **tls(service.config),
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


def tls(config: ServeConfig) -> dict[str, Any]:
    """uvicorn's options for HTTPS; none without a certificate."""
    if config.ssl_certfile is None:
        return {}
    return {
        "ssl_certfile": config.ssl_certfile,
        "ssl_keyfile": config.ssl_keyfile,
        "ssl_keyfile_password": config.ssl_keyfile_password,
        "ssl_ca_certs": None if config.ssl_ca_certs is None else str(config.ssl_ca_certs),
        "ssl_cert_reqs": ssl.CERT_NONE if config.ssl_ca_certs is None else ssl.CERT_REQUIRED,
    }


def check_tls(config: ServeConfig) -> None:
    """Raise ConfigError when the files of HTTPS cannot be used."""
    if config.ssl_certfile is None:
        return
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        if (path := getattr(config, name)) is not None:
            _check_readable(f"--{name.replace('_', '-')} {path}", path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(
            config.ssl_certfile, config.ssl_keyfile, lambda: config.ssl_keyfile_password or ""
        )
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
    except (OSError, ValueError) as error:
        reason = (getattr(error, "reason", None) or "").replace("_", " ").lower()
        why = f" ({reason})" if reason not in ("", "pem lib") else ""
        raise ConfigError(
            f"HTTPS cannot be served with --ssl-certfile {config.ssl_certfile}{why}; it needs a "
            "certificate in PEM, and its key there or in --ssl-keyfile."
        ) from None


def _check_readable(flag: str, path: Path) -> None:
    """OpenSSL does not tell which of several files it could not open."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise ConfigError(unreadable(flag, error)) from None


class _Uvicorn(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's own, with another entrance."""
        turnstile, exits = Turnstile(REQUESTS_A_TURN), Turnstile(EXITS_A_TURN)

        def protocol() -> Connection:
            return Connection(self.config, self.server_state, {}, turnstile=turnstile, exits=exits)

        entrances: list[Any] = [
            Entrance(listener, protocol, Connection.shutdown, self.config.ssl, self.config.backlog)
            for listener in sockets or ()
        ]
        self.servers = entrances
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
