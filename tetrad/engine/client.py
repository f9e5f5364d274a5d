"""The engine client of the first API process: starts the engine process and reports its death.

The engine's standard input is a pipe nobody writes to. It closes when this process ends for any
reason, and then the engine exits too. Further API processes join through `engine/link.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
import time
from typing import ClassVar

import zmq

from tetrad.core.config import ServeConfig
from tetrad.core.errors import ConfigError, EngineDiedError
from tetrad.core.messages import FIRST_WORKER, EngineProgress, Shutdown, WorkerJoined, WorkerLeft
from tetrad.core.option import secrets
from tetrad.core.stacks import STACKS_SIGNAL, STACKS_WAIT_S
from tetrad.engine.child import environment
from tetrad.engine.link import EngineLink, Progress
from tetrad.engine.wire import INBOX

LAST_WORDS_WAIT_S = 0.3
"""How long a dead process's last message may still be on its way."""
STOP_GRACE_S = 5.0
LONGEST_NAME = f"{INBOX}-{10**6}"
"""Of a socket in the private folder."""

NOTE = "note"
"""A progress message that belongs to no phase."""
NULL_WORKER = "tetrad.engine.null_worker"
"""The process of an engine without a model."""


class EngineClient(EngineLink):
    """One engine process. Make it with `start`; all methods belong to one event loop."""

    worker_module: ClassVar[str] = "tetrad.engine.worker"

    def __init__(self, on_progress: Progress | None = None) -> None:
        super().__init__(private_folder(), FIRST_WORKER, self._progress)
        self._process: asyncio.subprocess.Process | None = None
        self._listener = on_progress
        self._phase = "start"
        """What the engine does until it is ready."""
        self._phase_began_at = time.monotonic()

    @classmethod
    async def start(cls, config: ServeConfig, on_progress: Progress | None = None) -> EngineClient:
        """Start the engine process and wait until its model is loaded.

        Raises the engine's own UserError (ConfigError, CheckpointError, ...) when it cannot load
        what was asked, EngineDiedError when it ends or a phase exceeds `startup_timeout`.
        """
        client = cls(on_progress)
        try:
            await client._launch(config)
            await client._until_ready(config.startup_timeout)
        except BaseException:
            await client._close()
            raise
        return client

    def add_worker(self, worker: int) -> str:
        """Have the engine speak to one more API process too; returns the folder of the sockets,
        for `EngineLink.join`. Raises EngineDiedError."""
        self._send(WorkerJoined(worker))
        return self._folder

    def remove_worker(self, worker: int) -> None:
        """That process is gone: abort its requests. Raises EngineDiedError."""
        self._send(WorkerLeft(worker))

    async def end_stuck(self) -> None:
        """Have the engine process tell on stderr where each of its threads is, and kill it."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(STACKS_SIGNAL)
                await asyncio.sleep(STACKS_WAIT_S)
                self._process.kill()

    async def stop(self) -> None:
        """End the engine process; after a grace it is killed. Open requests get an error."""
        self._is_stopping = True
        self.fail(EngineDiedError("The engine was stopped."))
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(EngineDiedError):
                self._send(Shutdown())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), STOP_GRACE_S)
        await self._close()

    async def _launch(self, config: ServeConfig) -> None:
        self._open()
        # Secrets would be readable in the process list, and the engine has no use for them.
        text = config.model_dump_json(exclude=secrets(ServeConfig))
        module = NULL_WORKER if config.load_format == "null" else self.worker_module
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", module),
            *("--config-json", text, "--socket", self._folder),
            env=environment(),
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        self._keep(self._watch(self._process))

    def _progress(self, progress: EngineProgress) -> None:
        if progress.phase not in (self._phase, NOTE):
            self._phase, self._phase_began_at = progress.phase, time.monotonic()
        if self._listener is not None:
            self._listener(progress)

    async def _until_ready(self, most_s: float) -> None:
        """Wait as long as each phase of the start takes no more than `most_s`."""
        while not self._ready.done():
            left_s = self._phase_began_at + most_s - time.monotonic()
            if left_s <= 0:
                await self.end_stuck()
                raise EngineDiedError(
                    f"The engine has been at {self._phase!r} for {most_s:g} s, the most that "
                    "--startup-timeout lets a phase of its start take; raise it if the model is "
                    "large and its storage slow. Where its threads were is above."
                )
            await asyncio.wait({self._ready}, timeout=left_s)
        self._ready.result()

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        await asyncio.sleep(LAST_WORDS_WAIT_S)
        self.fail(EngineDiedError(_epitaph(code)))

    async def _close(self) -> None:
        self._is_stopping = True
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        await super()._close()
        shutil.rmtree(self._folder, ignore_errors=True)


def private_folder() -> str:
    """A new folder for the sockets. Raises ConfigError when there is no place for it."""
    try:
        for place in (None, "/tmp"):
            folder = tempfile.mkdtemp(prefix="tetrad-", dir=place)
            if len(os.fsencode(f"{folder}/{LONGEST_NAME}")) <= zmq.IPC_PATH_MAX_LEN:
                return folder
            os.rmdir(folder)
    except OSError as error:
        raise ConfigError(
            f"The processes cannot talk: no folder can be made for their sockets ({error}); set "
            "TMPDIR to one that can be written."
        ) from None
    raise ConfigError("The processes cannot talk: every folder for temporary files is too long.")


def _epitaph(code: int) -> str:
    """Reason for a death without last words. Negative codes are signals."""
    if code == -9:
        return (
            "The engine process was killed (signal 9). If nobody did it, the system ran out of "
            "memory: lower --mem-fraction-static."
        )
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"The engine process {how} without giving a reason; its last output is above."
