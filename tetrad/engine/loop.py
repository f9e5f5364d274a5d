"""The engine process's main loop: receive messages, step, send outputs. No torch here.

A second thread sends heartbeats: at least once a second it reports that the process is alive and
how long the current step has been running, even while that step does not end.

Several API processes may share the engine. Each brings two sockets, requests carry its number, and
after a step each gets one message with its own requests' outputs.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterable

import zmq

from tetrad.core.collector import calm_collector
from tetrad.core.config import ServeConfig
from tetrad.core.errors import CapacityError, EngineDiedError, RequestError, UserError
from tetrad.core.messages import (
    FIRST_WORKER,
    AbortRequests,
    AddRequests,
    Call,
    EngineDied,
    EngineProgress,
    EngineReady,
    EngineStats,
    Heartbeat,
    Message,
    RequestRefused,
    Shutdown,
    WorkerJoined,
    WorkerLeft,
)
from tetrad.core.request import Request
from tetrad.engine.calls import Calls
from tetrad.engine.engine import Engine
from tetrad.engine.gains import Gains
from tetrad.engine.outboxes import Outboxes
from tetrad.engine.shares import Shares
from tetrad.engine.wire import INBOX, address, decode

BEAT_INTERVAL_S = 0.5
GRAMMAR_POLL_MS = 2
"""How often an engine without work looks whether a grammar is compiled."""
LAST_WORDS_MS = 2000
"""How long the process waits for its last message to leave."""

Load = Callable[[ServeConfig, Callable[[EngineProgress], None]], Engine]


class EngineLoop:
    """Serves one engine over the sockets in `folder`, two for each API process."""

    def __init__(self, folder: str) -> None:
        self._context = zmq.Context()
        self._folder = folder
        self._workers: frozenset[int] = frozenset({FIRST_WORKER})
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.set_hwm(0)
        self._inbox.connect(address(folder, INBOX, FIRST_WORKER))
        self._outboxes = Outboxes(self._context, folder)
        self._outboxes.follow(self._workers)
        self._shares = Shares()
        self._engine: Engine | None = None
        self._step_started_at: float | None = None
        self._is_over = threading.Event()

    def run(self, config: ServeConfig, load: Load) -> int:
        """Load, serve until told to shut down, return the exit code. Last words are sent."""
        beat = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        beat.start()
        try:
            self._engine = load(config, self._outboxes.send_all)
            calm_collector()
            self._outboxes.send_all(EngineReady(self._engine.info, self._engine.limits))
            self._serve(self._engine)
        except UserError as error:
            return self._die(str(error), type(error).__name__, error.exit_code)
        except Exception as error:
            phase = "loading" if self._engine is None else "a step"
            logging.getLogger(__name__).exception("The engine ends in %s.", phase)
            cls = EngineDiedError
            return self._die(_reason(phase, error), cls.__name__, cls.exit_code)
        finally:
            self._is_over.set()
            beat.join()
            if self._engine is not None and self._engine.grammars is not None:
                self._engine.grammars.stop()
            self._context.destroy(linger=LAST_WORDS_MS)
            gc.unfreeze()  # else libraries report what was frozen as leaked when the process ends
        return 0

    def _serve(self, engine: Engine) -> None:
        if engine.grammars:
            engine.grammars.start()
        while self._take_messages(engine):
            self._admit_ready(engine)
            if not engine.can_step:
                continue
            self._step_started_at = time.monotonic()
            gains = engine.step()
            self._step_started_at = None
            self._hand_out(gains)

    def _admit_ready(self, engine: Engine) -> None:
        """Let in who need not wait for a grammar any more."""
        for rid, error in engine.admit_ready():
            self._refuse(rid, error, self._shares.owner(rid))
            self._shares.end(rid)

    def _refuse(self, rid: str, error: RequestError | CapacityError, worker: int) -> None:
        status = error.http_status if isinstance(error, RequestError) else 503
        param = error.param if isinstance(error, RequestError) else None
        self._outboxes.send(worker, RequestRefused(rid, str(error), status, param))

    def _hand_out(self, gains: Gains) -> None:
        """Of a step one message to each worker: what its requests got, and the figures that all
        show."""
        if gains:
            assert self._engine is not None
            stats = self._engine.stats()
            for step in gains.steps:
                for worker, message in self._shares.messages(step, self._workers, stats):
                    self._outboxes.send(worker, message)

    def _take_messages(self, engine: Engine) -> bool:
        """Handle what has come; sleeps until something comes if there is nothing to do. False at
        the end."""
        while True:
            try:
                if engine.awaits_grammars and not engine.can_step:
                    self._inbox.poll(GRAMMAR_POLL_MS)
                is_busy = engine.can_step or engine.awaits_grammars
                encoded = self._inbox.recv(zmq.NOBLOCK if is_busy else 0)
            except zmq.Again:
                return True
            message = decode(encoded)
            if isinstance(message, Shutdown):
                return False
            self._handle(engine, message)

    def _handle(self, engine: Engine, message: Message) -> None:
        match message:
            case AddRequests(requests):
                for request in requests:
                    self._add(engine, request)
            case AbortRequests(rids):
                self._abort(engine, rids)
            case Call():
                calls = Calls(engine, self._hand_out, self._outboxes.send_all)
                self._outboxes.send(message.worker, calls.answer(message))
            case WorkerJoined(worker):
                self._join(engine, worker)
            case WorkerLeft(worker):
                self._part(engine, worker)
            case _:
                raise ValueError(f"the engine does not take {type(message).__name__}")

    def _add(self, engine: Engine, request: Request) -> None:
        if request.worker not in self._workers:
            return  # it was under way when its worker died
        try:
            engine.add(request, is_checked=True)
        except (RequestError, CapacityError) as error:
            self._refuse(request.rid, error, request.worker)
        else:
            self._shares.begin(request)

    def _abort(self, engine: Engine, rids: Iterable[str]) -> None:
        for rid in rids:
            engine.abort(rid)
            self._shares.end(rid)

    def _join(self, engine: Engine, worker: int) -> None:
        self._workers |= {worker}
        self._inbox.connect(address(self._folder, INBOX, worker))
        self._outboxes.follow(self._workers)
        self._outboxes.send(worker, EngineReady(engine.info, engine.limits))

    def _part(self, engine: Engine, worker: int) -> None:
        self._workers -= {worker}
        self._inbox.disconnect(address(self._folder, INBOX, worker))
        self._outboxes.follow(self._workers)
        self._abort(engine, self._shares.of(worker))

    def _beat(self) -> None:
        # Sockets belong to threads, so the beat has its own.
        outboxes = Outboxes(self._context, self._folder)
        while not self._is_over.wait(BEAT_INTERVAL_S):
            outboxes.follow(self._workers)
            started_at = self._step_started_at
            age_s = time.monotonic() - started_at if started_at is not None else 0.0
            stats = self._engine.stats() if self._engine else EngineStats()
            outboxes.send_all(Heartbeat(age_s, stats))

    def _die(self, reason: str, kind: str, exit_code: int) -> int:
        self._outboxes.send_all(EngineDied(reason, exit_code, kind))
        return exit_code


def _reason(phase: str, error: Exception) -> str:
    """One sentence on an unexpected end; memory errors name the cure."""
    kind = type(error).__name__
    text = f"The engine ended in {phase}: {kind}: {error}"
    if kind == "OutOfMemoryError":
        text += " Lower --mem-fraction-static or --chunked-prefill-size."
    return text
