"""Further API processes: started, told what to do, and started anew when one dies.

    the first process ── engine, port, signals, and requests as all the others
      ├── worker 1 ── a listening socket of its own on the same port, two sockets to the engine
      ├── worker 2 ── ...
      └── the annex ── a Unix socket instead of the port; started once all others serve

The system spreads connections over the listening sockets by their addresses (SO_REUSEPORT): evenly,
where processes that accept from one socket take whole bursts.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import sys
import time

from tetrad.core.errors import EngineDiedError, TetradError
from tetrad.core.messages import FIRST_WORKER
from tetrad.core.stacks import STACKS_SIGNAL, STACKS_WAIT_S
from tetrad.engine.child import environment
from tetrad.server.engine_port import StartedEngine
from tetrad.server.process.orders import Begin, BeReady, Drain, End, Fail, Join, Order, line
from tetrad.server.service import Service
from tetrad.server.shared.beat import BEAT_S, MOST_LOST_STARTS, Watch, stopped_s
from tetrad.server.shared.tally import IS_SERVING

_log = logging.getLogger(__name__)

FEW_PROCESSORS = 8
"""On a machine with fewer, one API process serves."""
PROCESSORS_EACH = 4
MOST_AUTOMATIC = 4

POLL_S = 0.01
END_GRACE_S = 8.0
"""Longer than open responses get to send what they have."""
STABLE_S = 30.0
"""A process that lived so long is started anew at once; else after a pause that grows."""
LONGEST_PAUSE_S = 30.0


def automatic(num_processors: int) -> int:
    """How many API processes serve if nobody says."""
    if num_processors < FEW_PROCESSORS:
        return 1
    return min(MOST_AUTOMATIC, num_processors // PROCESSORS_EACH)


class ApiWorkers:
    """All API processes of a server but the first."""

    def __init__(
        self, service: Service, listener: socket.socket, annex: socket.socket | None = None
    ) -> None:
        """`annex`: where that listens, if there is to be one."""
        self.failed: asyncio.Future[TetradError] = asyncio.get_running_loop().create_future()
        """Done when one ended before all were ready."""
        self._service = service
        self._listener = listener
        self._annex = annex
        num_serving = service.config.api_workers or 1
        self._numbers, self._annex_number = range(1, num_serving), num_serving
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._joined_at: dict[int, float] = {}
        """When each that does not serve yet was told to."""
        self._known_as: dict[int, int] = {}
        """The number of each in the engine, another one after each start."""
        self._next_known = itertools.count(FIRST_WORKER + 1)
        self._engine: StartedEngine | None = None
        self._startup_s: float | None = None
        """Of the server; None until all are ready."""
        self._ending = asyncio.Event()
        self._keepers: list[asyncio.Task[None]] = []
        self._watcher: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the processes; they load while the engine does."""
        self._keepers = [asyncio.create_task(self._keep(number)) for number in self._numbers]
        if self._keepers or self._annex:
            self._watcher = asyncio.create_task(self._watch())

    async def join(self, engine: StartedEngine) -> float:
        """The engine is ready: have all serve, and wait until they do; returns how long the server
        took to start. Raises TetradError when one cannot."""
        self._engine = engine
        for number in self._processes:
            self._join(number)
        serving = self._service.tally.each
        while not all(serving(IS_SERVING)[number] for number in self._numbers):
            if self.failed.done():
                raise self.failed.result()
            for keeper in self._keepers:
                if keeper.done():
                    keeper.result()
            await asyncio.sleep(POLL_S)
        self._startup_s = self._service.age_s
        self._tell_all(BeReady(self._startup_s))
        if self._annex is not None:
            self._keepers.append(asyncio.create_task(self._keep(self._annex_number)))
        return self._startup_s

    def drain(self) -> None:
        """Have all take no new requests. One that dies is not started anew."""
        self._ending.set()
        self._tell_all(Drain())

    def fail(self, reason: str) -> None:
        """Have all tell their clients that the engine has died."""
        self._ending.set()
        self._tell_all(Fail(reason))

    async def stop(self) -> None:
        """End all; those that take too long are killed."""
        self._ending.set()
        if self._watcher is not None:
            self._watcher.cancel()
        for number, process in self._processes.items():
            if self._service.tally.each(IS_SERVING)[number]:
                self._tell(number, End())
            else:
                _kill(process)
        if self._keepers:
            await asyncio.wait(self._keepers, timeout=END_GRACE_S)
        for process in self._processes.values():
            _kill(process)
        await asyncio.gather(*self._keepers, return_exceptions=True)
        if self._annex is not None:
            self._annex.close()  # nobody need wait there any more

    async def _keep(self, number: int) -> None:
        """Have a process of that number run until the server ends."""
        pause_s, num_lost = 0.0, 0
        while not self._ending.is_set():
            begun_at = time.monotonic()
            how = f"API process {number} {await self._run(number)}"
            if self._ending.is_set():
                return
            if self._startup_s is None:
                if not self.failed.done():
                    self.failed.set_result(TetradError(f"{how} while the server started."))
                return
            has_lasted = time.monotonic() - begun_at >= STABLE_S
            pause_s = 0.0 if has_lasted else min(LONGEST_PAUSE_S, 2 * pause_s + 0.1)
            num_lost = 0 if has_lasted else num_lost + 1
            self._service.tally.bury(number, num_lost)
            _log.error("%s; its requests are lost, and %s.", how, _what_next(num_lost, pause_s))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), pause_s)

    async def _watch(self) -> None:
        """End those that have stopped, so that they are started anew."""
        limit_s = stopped_s(self._service.config)
        watch = Watch(self._service.tally, limit_s)
        while not self._ending.is_set():
            await asyncio.sleep(BEAT_S)
            serving = self._service.tally.each(IS_SERVING)
            stopped = dict.fromkeys(watch.look(self._processes), f"has not moved for {limit_s:g} s")
            most_s, now = self._service.config.startup_timeout, time.monotonic()
            for number, joined_at in self._joined_at.items():
                if not serving[number] and now - joined_at > most_s:
                    stopped[number] = f"does not serve {most_s:g} s after its start"
            for number, how in stopped.items():
                await self._end_stopped(number, how)

    async def _end_stopped(self, number: int, how: str) -> None:
        if (process := self._processes.get(number)) is None:
            return
        _log.error("API process %d %s; its threads are at:", number, how)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(STACKS_SIGNAL)
        await asyncio.sleep(STACKS_WAIT_S)
        _kill(process)

    async def _run(self, number: int) -> str:
        """A process from start to end; returns how it ended."""
        try:
            process = await self._spawn(number)
        except OSError as error:
            return f"could not be started ({error})"
        self._processes[number] = process
        if self._ending.is_set():
            _kill(process)
        if self._engine is not None:
            self._join(number)
        code = await process.wait()
        self._bury(number)
        return _death(code)

    async def _spawn(self, number: int) -> asyncio.subprocess.Process:
        tally, shelf = self._service.tally, self._service.shelf
        kept = -1 if shelf is None else shelf.file
        annex = self._annex if number == self._annex_number else None
        with _another(self._listener) if annex is None else annex.dup() as listener:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "tetrad.server.process.worker"),
                *("--number", str(number)),
                *("--tally", str(tally.file), "--shelf", str(kept)),
                *("--listener", str(listener.fileno()), *(("--annex",) if annex else ())),
                env=environment(),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=[fd for fd in (tally.file, kept, listener.fileno()) if fd >= 0],
                start_new_session=True,
            )
        service = self._service
        begin = Begin(
            config_json=service.config.model_dump_json(),
            command=list(service.command),
            started_at=service.started_at,
            num_workers=tally.num_rows,
            annex="" if self._annex is None else self._annex.getsockname(),
        )
        _write(process, begin)
        return process

    def _join(self, number: int) -> None:
        assert self._engine is not None
        with contextlib.suppress(EngineDiedError):
            known_as = next(self._next_known)
            folder = self._engine.add_worker(known_as)
            self._known_as[number] = known_as
            self._joined_at[number] = time.monotonic()
            self._tell(number, Join(folder, known_as))
            if self._startup_s is not None:
                self._tell(number, BeReady(self._startup_s))

    def _bury(self, number: int) -> None:
        del self._processes[number]
        self._joined_at.pop(number, None)
        self._service.tally.bury(number)
        known_as = self._known_as.pop(number, None)
        if known_as is not None and self._engine is not None:
            with contextlib.suppress(EngineDiedError):
                self._engine.remove_worker(known_as)

    def _tell_all(self, order: Order) -> None:
        for number in self._processes:
            self._tell(number, order)

    def _tell(self, number: int, order: Order) -> None:
        _write(self._processes[number], order)


def _write(process: asyncio.subprocess.Process, order: Order) -> None:
    """A process that has ended is told nothing."""
    assert process.stdin is not None
    if not process.stdin.is_closing():
        process.stdin.write(line(order))


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def _another(listener: socket.socket) -> socket.socket:
    """A further socket on the address of `listener`, bound; it gets no connections before it
    listens."""
    further = socket.socket(listener.family, listener.type, listener.proto)
    try:
        further.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        further.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        further.bind(listener.getsockname())
    except BaseException:
        further.close()
        raise
    return further


def _death(code: int) -> str:
    """Negative codes are signals."""
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _what_next(num_lost: int, pause_s: float) -> str:
    """After so many short lives in a row."""
    if num_lost < MOST_LOST_STARTS:
        return "it is started anew"
    return (
        f"it is started anew in {pause_s:.1f} s; this was time {num_lost} in a row, and /health "
        "says so until it serves"
    )
