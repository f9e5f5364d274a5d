"""A further API process: `python -m tetrad.server.process.worker --number N --tally FD --shelf FD
--listener FD`, or with `--annex` the one that reads large bodies.

Started by `workers.ApiWorkers` with a pipe as standard input, by which it is told what to do. When
the pipe closes, the first process is gone and this one ends. When the first process has stopped,
this one ends it. Signals of a terminal or a service manager are the first process's to handle.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial

import uvloop

from tetrad.core.collector import calm_collector_in_short_walks
from tetrad.core.config import ServeConfig
from tetrad.core.errors import EngineDiedError, TetradError
from tetrad.core.stacks import STACKS_SIGNAL, STACKS_WAIT_S, show_stacks_when_asked
from tetrad.engine.link import EngineLink
from tetrad.server.http.server import HttpServer
from tetrad.server.model import ServedModel
from tetrad.server.process.annex import AnnexServer
from tetrad.server.process.console import Console
from tetrad.server.process.orders import Begin, BeReady, Drain, End, Fail, Join, Order, orders
from tetrad.server.service import Service
from tetrad.server.shared.beat import BEAT_S, Watch, stopped_s
from tetrad.server.shared.shelf import Shelf
from tetrad.server.shared.tally import IS_SERVING, Tally
from tetrad.server.telemetry.logs import set_up_logging

LAST_ORDER_WAIT_S = 10.0
"""A process that cannot hear the engine is soon told to end; if not, only it is at fault."""
LAST_WORDS_S = 2 * BEAT_S
"""Within so long all processes see that the first has stopped, and tell their clients."""

Server = HttpServer | AnnexServer


class Worker:
    """One process from start to end."""

    def __init__(self, service: Service, begin: Callable[[], Server], number: int) -> None:
        """`begin` begins to serve."""
        self._service = service
        self._begin = begin
        self._number = number
        self._first = os.getppid()
        self._join: asyncio.Future[Join] = asyncio.get_running_loop().create_future()
        self._end = asyncio.Event()
        self._link: EngineLink | None = None

    async def serve(self) -> int:
        """Serve from `Join` to `End`; returns the exit code."""
        join = await self._join
        self._link = link = await EngineLink.join(join.folder, join.worker)
        self._service.attach(link, is_ready=False)
        server = self._begin()
        try:
            calm_collector_in_short_walks()
            await server.listens()
            self._service.tally.put(IS_SERVING, 1.0)
            return await self._until_the_end(link, server)
        finally:
            await link.stop()
            await server.end()
            self._service.reporter.close()

    async def _until_the_end(self, link: EngineLink, server: Server) -> int:
        told = asyncio.ensure_future(self._end.wait())
        watching = asyncio.ensure_future(self._watch_first(link))
        await asyncio.wait((told, link.died, server.ended), return_when=asyncio.FIRST_COMPLETED)
        if link.died.done():
            self._service.fail(str(link.died.result()))
            await asyncio.wait((told,), timeout=LAST_ORDER_WAIT_S)
        told.cancel()
        watching.cancel()
        return 0 if self._end.is_set() else EngineDiedError.exit_code

    async def _watch_first(self, link: EngineLink) -> None:
        """When the first process has stopped: tell the clients, then end it, and all with it. If
        it is the only one that takes connections, its end would help nobody."""
        if self._service.config.api_workers == 1:
            return
        limit_s = stopped_s(self._service.config)
        watch = Watch(self._service.tally, limit_s)
        while not watch.look([0]):
            await asyncio.sleep(BEAT_S)
        reason = f"API process 0 has not moved for {limit_s:g} s, so the server was ended."
        self._service.fail(reason)
        link.fail(EngineDiedError(reason))
        await asyncio.sleep(LAST_WORDS_S)
        if self._number == self._service.tally.each(IS_SERVING).index(1.0, 1):
            console = Console(sys.stderr)
            console.say("API process 0 has stopped; its threads are at:")
            self._signal_first(STACKS_SIGNAL)
            await asyncio.sleep(STACKS_WAIT_S)
            console.error(reason)
        else:
            await asyncio.sleep(2 * STACKS_WAIT_S)
        self._signal_first(signal.SIGKILL)

    def _signal_first(self, number: signal.Signals) -> None:
        if os.getppid() == self._first:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._first, number)

    def obey(self, order: Order) -> None:
        """Do what the first process says."""
        match order:
            case Join():
                self._join.set_result(order)
            case BeReady(startup_s):
                self._service.be_ready(startup_s)
            case Drain():
                self._service.phase = "draining"
            case Fail(reason):
                self._service.fail(reason)
                if self._link is not None:
                    self._link.fail(EngineDiedError(reason))
            case End():
                self._end.set()


def main() -> int:
    """Serve until told to end; returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    show_stacks_when_asked()
    parser = argparse.ArgumentParser(prog="tetrad.server.process.worker")
    parser.add_argument("--number", required=True, type=int)
    parser.add_argument("--tally", required=True, type=int, metavar="DESCRIPTOR")
    parser.add_argument("--shelf", required=True, type=int, metavar="DESCRIPTOR")
    parser.add_argument("--listener", required=True, type=int, metavar="DESCRIPTOR")
    parser.add_argument("--annex", action="store_true")
    arguments = parser.parse_args()
    told = orders(sys.stdin.fileno())
    begin = next(told, None)
    if not isinstance(begin, Begin):
        return EngineDiedError.exit_code
    config = ServeConfig.model_validate_json(begin.config_json)
    set_up_logging(config, f"api-{arguments.number} ")
    tally = Tally(begin.num_workers, arguments.number, arguments.tally)
    num_stored = config.max_stored_responses
    shelf = Shelf(num_stored, file=arguments.shelf) if num_stored else None
    try:
        service = Service(config, ServedModel.load(config), tally, shelf)
    except TetradError as error:
        logging.getLogger(__name__).error("%s", error)  # noqa: TRY400 - a user's mistake
        return error.exit_code
    service.command, service.started_at = tuple(begin.command), begin.started_at
    with socket.socket(fileno=arguments.listener) as listener:
        serve = (
            partial(AnnexServer, service, listener)
            if arguments.annex
            else partial(HttpServer, service, listener, begin.annex)
        )
        return uvloop.run(_serve(service, serve, arguments.number, told))


async def _serve(
    service: Service, begin: Callable[[], Server], number: int, told: Iterator[Order]
) -> int:
    worker = Worker(service, begin, number)
    watch = threading.Thread(
        target=_pass_on, args=(told, worker, asyncio.get_running_loop()), daemon=True
    )
    watch.start()
    return await worker.serve()


def _pass_on(told: Iterator[Order], worker: Worker, loop: asyncio.AbstractEventLoop) -> None:
    """Hand each order to the event loop; ends the process with the first one, whatever it does."""
    for order in told:
        loop.call_soon_threadsafe(worker.obey, order)
    os._exit(EngineDiedError.exit_code)


if __name__ == "__main__":
    sys.exit(main())
