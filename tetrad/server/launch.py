"""Starting and ending the server process.

    bind the port → answer /health with 503 → start the engine → serve
    SIGTERM, SIGINT → 503 to newcomers, let the others finish → stop the engine → exit 0
    the engine dies or sticks → every open request gets an error → exit 5, reason on stderr

The port is bound first: a taken port is told in a second, not after a model was loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvicorn
import uvloop

from tetrad.core.collector import calm_collector
from tetrad.core.config import ServeConfig
from tetrad.core.errors import ConfigError, EngineDiedError, TetradError, UnsupportedError
from tetrad.core.messages import EngineProgress
from tetrad.data import NAME, model_folder
from tetrad.engine.client import EngineClient
from tetrad.server.app import build_app
from tetrad.server.console import Console
from tetrad.server.engine_port import EnginePort
from tetrad.server.model import ServedModel
from tetrad.server.service import Service

POLL_S = 0.1
BACKLOG = 2048
KEEP_ALIVE_S = 65
"""Longer than clients and proxies usually keep an idle connection, so that they close it first."""
LAST_BYTES_S = 5
"""How long open responses get to send what they have."""
EVERYWHERE = ("0.0.0.0", "::", "")

StartEngine = Callable[[ServeConfig, Callable[[EngineProgress], None]], Awaitable[EnginePort]]


def run(config: ServeConfig, start_engine: StartEngine = EngineClient.start) -> int:
    """Serve until told to end; returns the exit code. Errors of ours are told on stderr."""
    console = Console(sys.stderr)
    _set_up_logging(config)
    try:
        resolved = _resolve(config)
        with _bind(resolved) as listener:
            _warn_if_open(resolved, console)
            return uvloop.run(Launch(resolved, listener, console).serve(start_engine))
    except TetradError as error:
        console.error(str(error))
        return error.exit_code


def _resolve(config: ServeConfig) -> ServeConfig:
    """Fill in what does not depend on the machine."""
    if config.tp > 1:
        raise UnsupportedError(
            f"--tp {config.tp} is not supported in this version; leave it out to use one device."
        )
    folder = model_folder(config.model)
    if config.load_format == "auto" and not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder; MODEL is a folder with config.json (nothing is "
            f"downloaded), or {NAME}, the embedded model."
        )
    name = config.served_model_name or folder.resolve().name
    return config.model_copy(update={"model": folder, "served_model_name": name})


def _bind(config: ServeConfig) -> socket.socket:
    """A bound socket; a port that cannot be had is a ConfigError."""
    try:
        infos = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = infos[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host {config.host} cannot be used: {error.strerror}.") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"Port {config.port} on {config.host} cannot be had ({error.strerror}); choose another "
            "with --port, or --port 0 for a free one."
        ) from None
    return listener


def _set_up_logging(config: ServeConfig) -> None:
    logging.basicConfig(
        level=config.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )
    # uvicorn's own announcements say less than ours.
    quiet = logging.INFO if config.log_level == "debug" else logging.ERROR
    logging.getLogger("uvicorn").setLevel(quiet)


def _warn_if_open(config: ServeConfig, console: Console) -> None:
    if config.host in EVERYWHERE and config.api_key is None:
        console.say(
            f"Warning: --host {config.host} without --api-key lets everyone who reaches this "
            "machine use the model."
        )


class Launch:
    """One server process from start to end."""

    def __init__(self, config: ServeConfig, listener: socket.socket, console: Console) -> None:
        self._config = config
        self._listener = listener
        self._console = console
        self._service = Service(config, ServedModel.load(config))
        self._told_to_end = asyncio.Event()

    async def serve(self, start_engine: StartEngine) -> int:
        """Start, serve, end. Raises what ended it, unless that was a signal."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        http = HttpServer(self._service, self._listener)
        try:
            await self._serve(start_engine, http)
        finally:
            await http.end()
        return 0

    async def _serve(self, start_engine: StartEngine, http: HttpServer) -> None:
        starting = asyncio.ensure_future(start_engine(self._config, self._progress))
        await self._until_told_to_end(starting, http.ended)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return
        engine = starting.result()
        try:
            self._service.attach(engine)
            calm_collector()
            self._console.ready(self._service, url(self._config, self._listener))
            await self._watch(engine, http)
            await self._drain(engine)
        except EngineDiedError as error:
            self._service.fail(str(error))
            raise
        finally:
            await engine.stop()

    async def _until_told_to_end(
        self, *others: asyncio.Future[Any], timeout_s: float | None = None
    ) -> None:
        """Wait for a signal or the first of `others`."""
        told = asyncio.ensure_future(self._told_to_end.wait())
        try:
            await asyncio.wait(
                (told, *others), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            told.cancel()

    async def _watch(self, engine: EnginePort, http: HttpServer) -> None:
        """Until a signal. Raises EngineDiedError when the engine dies or sticks."""
        while not (self._told_to_end.is_set() or http.ended.done()):
            _check_alive(engine, self._config.step_timeout)
            await self._until_told_to_end(engine.died, http.ended, timeout_s=POLL_S)

    async def _drain(self, engine: EnginePort) -> None:
        """Let open requests finish, as long as they may take."""
        self._service.phase = "draining"
        if num_open := self._service.open_requests:
            self._console.say(
                f"Ending: {num_open} open requests have {self._config.drain_timeout:g} s to "
                "finish; a second signal ends at once."
            )
        else:
            self._console.say("Ending: no request is open.")
        deadline = time.monotonic() + self._config.drain_timeout
        while self._service.open_requests and time.monotonic() < deadline:
            _check_alive(engine, self._config.step_timeout)
            await asyncio.sleep(POLL_S)

    def _progress(self, progress: EngineProgress) -> None:
        self._service.detail = f"{progress.phase} {progress.detail}".rstrip()
        self._console.progress(progress)

    def _signalled(self, number: int) -> None:
        if self._told_to_end.is_set():
            # The engine process ends by itself when this one is gone.
            self._console.say("Ended at once.")
            os._exit(128 + number)
        self._told_to_end.set()


def _check_alive(engine: EnginePort, step_timeout_s: float) -> None:
    """Raise EngineDiedError when the engine has died, sticks in a step or fell silent."""
    if engine.died.done():
        raise engine.died.result()
    if engine.step_age_s > step_timeout_s:
        raise EngineDiedError(
            f"The engine is stuck: its step has been running for {engine.step_age_s:.0f} s and "
            f"--step-timeout is {step_timeout_s:g} s."
        )
    if engine.last_beat_age_s > step_timeout_s:
        raise EngineDiedError(
            f"The engine is stuck: it has been silent for {engine.last_beat_age_s:.0f} s and "
            f"--step-timeout is {step_timeout_s:g} s."
        )


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
            http="httptools",
            timeout_graceful_shutdown=LAST_BYTES_S,
        )
        self._server = _Uvicorn(config)
        self.ended = asyncio.ensure_future(self._server.serve(sockets=[listener]))
        """Done when it serves no more; the result may be an exception."""

    async def end(self) -> None:
        """Take no more connections, let open responses send their last bytes."""
        self._server.should_exit = True
        await self.ended


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def url(config: ServeConfig, listener: socket.socket) -> str:
    """Where clients on this machine find the server."""
    port = listener.getsockname()[1]
    host = "127.0.0.1" if config.host in EVERYWHERE else config.host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
