"""The API process's end of the engine: starts the process, streams what it gives, tells its death.

Two sockets in a folder only this user can enter: what the API says goes out by one, what the engine
says comes in by the other. The engine's standard input is a pipe nobody writes to: it closes when
this process ends, however it ends, and then the engine ends too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import zmq
import zmq.asyncio
from msgspec import structs

from tetrad.core import errors
from tetrad.core.config import ServeConfig
from tetrad.core.errors import ConfigError, EngineDiedError, RequestError, TetradError
from tetrad.core.messages import (
    AbortRequests,
    AddRequests,
    Call,
    EngineDied,
    EngineProgress,
    EngineReady,
    EngineStats,
    Heartbeat,
    Message,
    Reply,
    RequestRefused,
    Shutdown,
    StepOutputs,
)
from tetrad.core.request import Request, RequestOutput
from tetrad.engine.wire import INBOX, OUTBOX, address, decode, encode

_log = logging.getLogger(__name__)

LAST_WORDS_WAIT_S = 0.3
"""How long a dead process's last message may still be on its way."""
STOP_GRACE_S = 5.0

Progress = Callable[[EngineProgress], None]

NULL_WORKER = "tetrad.engine.null_worker"
"""The process of an engine without a model."""


class EngineClient:
    """One engine process. Make it with `start`; all methods belong to one event loop."""

    worker_module: ClassVar[str] = "tetrad.engine.worker"

    def __init__(self, on_progress: Progress | None = None) -> None:
        loop = asyncio.get_running_loop()
        self.info: dict[str, Any] = {}
        """What the engine resolved and chose; filled once it is ready."""
        self.stats = EngineStats()
        self.step_age_s = 0.0
        """How long the step of the last heartbeat had been running."""
        self.died: asyncio.Future[EngineDiedError] = loop.create_future()
        """Done when the engine ended unasked; the result is the error open requests got."""
        self._on_progress = on_progress
        self._ready: asyncio.Future[None] = loop.create_future()
        self._live_rids: set[str] = set()
        self._streams: dict[str, asyncio.Queue[RequestOutput | TetradError]] = {}
        """By the name that the request has in the engine."""
        self._num_requests = 0
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._num_calls = 0
        self._is_stopping = False
        self._last_message_at = time.monotonic()
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._folder = _private_folder()
        self._context = zmq.Context()
        self._outgoing = self._context.socket(zmq.PUSH)
        self._incoming = zmq.asyncio.Context.shadow(self._context).socket(zmq.PULL)

    @classmethod
    async def start(cls, config: ServeConfig, on_progress: Progress | None = None) -> EngineClient:
        """Start the engine process and wait until its model is loaded.

        Raises the engine's own UserError (ConfigError, CheckpointError, ...) when it cannot load
        what was asked, EngineDiedError when it ends or exceeds `startup_timeout`.
        """
        client = cls(on_progress)
        try:
            await client._launch(config)
            await asyncio.wait_for(client._ready, config.startup_timeout)
        except TimeoutError:
            await client._close()
            raise EngineDiedError(
                f"The engine did not load within {config.startup_timeout:g} s; raise "
                "--startup-timeout if the model is large and its storage slow."
            ) from None
        except BaseException:
            await client._close()
            raise
        return client

    @property
    def last_beat_age_s(self) -> float:
        """Seconds since the engine last said anything; it does so at least once a second."""
        return time.monotonic() - self._last_message_at

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Yield what each step gives `request`; ends after the output that carries `finish`.

        Raises RequestError before the first output if the engine refuses the request, and
        EngineDiedError if the engine dies. Leaving the iterator early aborts the request.

        In the engine the request has a name of its own, never used again: what the engine still
        sends for one that was left must not reach a later one of the same rid.
        """
        if request.rid in self._live_rids:
            raise RequestError(f"Request id {request.rid!r} is already running.", param="rid")
        self._num_requests += 1
        name = f"{self._num_requests}.{request.rid}"
        self._live_rids.add(request.rid)
        stream = self._streams[name] = asyncio.Queue()
        is_over = False
        try:
            self._send(AddRequests([replace(request, rid=name)]))
            while not is_over:
                item = await stream.get()
                if isinstance(item, TetradError):
                    is_over = True
                    raise item
                is_over = item.finish is not None
                yield structs.replace(item, rid=request.rid)
        finally:
            self._live_rids.remove(request.rid)
            del self._streams[name]
            if not is_over:
                with contextlib.suppress(EngineDiedError):
                    self._send(AbortRequests([name]))

    async def flush_cache(self) -> tuple[bool, str]:
        """Empty the prefix cache. False with the reason while anything runs or waits."""
        reply = await self._call("flush_cache")
        return reply.ok, reply.text

    async def state(self) -> dict[str, Any]:
        """`stats` read now, and `integrity`: "ok" or the sentence of what leaks."""
        return (await self._call("state")).data

    async def stop(self) -> None:
        """End the engine process; after a grace it is killed. Open requests get an error."""
        self._is_stopping = True
        self._fail(EngineDiedError("The engine was stopped."))
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(EngineDiedError):
                self._send(Shutdown())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), STOP_GRACE_S)
        await self._close()

    async def _launch(self, config: ServeConfig) -> None:
        for socket, name in ((self._outgoing, INBOX), (self._incoming, OUTBOX)):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(address(self._folder, name))
        # The key would be readable in the process list, and the engine has no use for it.
        text = config.model_dump_json(exclude={"api_key"})
        module = NULL_WORKER if config.load_format == "null" else self.worker_module
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", module),
            *("--config-json", text, "--socket", self._folder),
            env=_environment(),
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        self._tasks = [
            asyncio.create_task(self._read()),
            asyncio.create_task(self._watch(self._process)),
        ]
        for task in self._tasks:
            task.add_done_callback(self._not_listening)

    def _send(self, message: Message) -> None:
        if self.died.done():
            raise self.died.result()
        try:
            self._outgoing.send_multipart(encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            raise EngineDiedError("The engine process no longer listens.") from None

    async def _call(self, name: str) -> Reply:
        self._num_calls += 1
        call = Call(self._num_calls, name)
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[call.call_id] = reply
        try:
            self._send(call)
            return await reply
        finally:
            del self._calls[call.call_id]

    async def _read(self) -> None:
        try:
            while True:
                self._receive(decode(await self._incoming.recv_multipart()))
        except ValueError as error:
            self._fail(EngineDiedError(f"The engine sent something unreadable: {error}."))

    def _receive(self, message: Message) -> None:
        self._last_message_at = time.monotonic()
        match message:
            case StepOutputs(outputs, stats):
                self.stats, self.step_age_s = stats, 0.0
                for output in outputs:
                    self._deliver(output.rid, output)
            case Heartbeat(step_age_s, stats):
                self.stats, self.step_age_s = stats, step_age_s
            case RequestRefused(rid, text, http_status, param):
                self._deliver(rid, RequestError(text, http_status=http_status, param=param))
            case Reply(call_id):
                if (reply := self._calls.get(call_id)) and not reply.done():
                    reply.set_result(message)
            case EngineProgress() if self._on_progress:
                self._on_progress(message)
            case EngineReady(info):
                self.info = info
                self._ready.set_result(None)
            case EngineDied():
                self._fail(_error_of(message))

    def _deliver(self, rid: str, item: RequestOutput | TetradError) -> None:
        if stream := self._streams.get(rid):
            stream.put_nowait(item)

    def _not_listening(self, task: asyncio.Task[None]) -> None:
        """A task that fails leaves nobody to hear the engine: nobody must wait for it then."""
        if not task.cancelled() and (error := task.exception()):
            _log.error("The engine cannot be heard any more.", exc_info=error)
            self._fail(EngineDiedError(f"The engine cannot be heard any more: {error!r}."))

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        await asyncio.sleep(LAST_WORDS_WAIT_S)
        self._fail(EngineDiedError(_epitaph(code)))

    def _fail(self, error: TetradError) -> None:
        """Give everyone who waits `error`. The first call decides; later ones find nobody."""
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()
        if not self.died.done() and not self._is_stopping and isinstance(error, EngineDiedError):
            self.died.set_result(error)
        for stream in self._streams.values():
            stream.put_nowait(error)
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(error)

    async def _close(self) -> None:
        self._is_stopping = True
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._incoming.close()
        self._outgoing.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)


def _private_folder() -> str:
    """A new folder for the sockets. Raises ConfigError when there is no place for it."""
    try:
        for place in (None, "/tmp"):
            folder = tempfile.mkdtemp(prefix="tetrad-", dir=place)
            if len(os.fsencode(f"{folder}/{INBOX}")) <= zmq.IPC_PATH_MAX_LEN:
                return folder
            os.rmdir(folder)
    except OSError as error:
        raise ConfigError(
            f"The processes cannot talk: no folder can be made for their sockets ({error}); set "
            "TMPDIR to one that can be written."
        ) from None
    raise ConfigError("The processes cannot talk: every folder for temporary files is too long.")


def _environment() -> dict[str, str]:
    """Ours, with this very package to be found first. The current folder is not searched (-P): a
    stray file there must not stand in for a module.

    Threads of OpenMP wait passively. By default they spin, and a team of which one thread waits for
    a core that others use then costs many times the work it shares.
    """
    root = str(Path(__file__).parents[2])
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join(filter(None, (root, inherited)))
    return {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PYTHONPATH": path}


def _error_of(words: EngineDied) -> TetradError:
    cls = getattr(errors, words.kind, EngineDiedError)
    known = isinstance(cls, type) and issubclass(cls, errors.UserError)
    return cls(words.reason) if known else EngineDiedError(words.reason)


def _epitaph(code: int) -> str:
    """Reason for a death without last words. Negative codes are signals."""
    if code == -9:
        return (
            "The engine process was killed (signal 9). If nobody did it, the system ran out of "
            "memory: lower --mem-fraction-static."
        )
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"The engine process {how} without giving a reason; its last output is above."
