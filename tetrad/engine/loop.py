"""The engine process's loop: take messages in, step, give outputs out. No torch here.

A second thread beats: it says at least once a second that the process lives and how long the
current step has been running, also while that step does not end.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable

import zmq

from tetrad.core.collector import calm_collector
from tetrad.core.config import ServeConfig
from tetrad.core.errors import EngineDiedError, RequestError, UserError
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
from tetrad.core.request import Request
from tetrad.engine.engine import Engine
from tetrad.engine.wire import INBOX, OUTBOX, address, decode, encode

BEAT_INTERVAL_S = 0.5
LAST_WORDS_MS = 2000
"""How long the process waits for its last message to leave."""

Load = Callable[[ServeConfig, Callable[[EngineProgress], None]], Engine]


class EngineLoop:
    """Serves one engine over the two sockets in `folder`."""

    def __init__(self, folder: str) -> None:
        self._context = zmq.Context()
        self._folder = folder
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.set_hwm(0)
        self._inbox.connect(address(folder, INBOX))
        self._outbox = self._new_outbox()
        self._engine: Engine | None = None
        self._step_started_at: float | None = None
        self._is_over = threading.Event()

    def run(self, config: ServeConfig, load: Load) -> int:
        """Load, serve until told to shut down, return the exit code. Last words are sent."""
        beat = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        beat.start()
        try:
            self._engine = load(config, self._send)
            calm_collector()
            self._send(EngineReady(self._engine.info))
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
            self._context.destroy(linger=LAST_WORDS_MS)
            gc.unfreeze()  # else libraries report what was frozen as leaked when the process ends
        return 0

    def _serve(self, engine: Engine) -> None:
        while self._take_messages(engine):
            if not engine.has_work:
                continue
            self._step_started_at = time.monotonic()
            outputs = engine.step()
            self._step_started_at = None
            if outputs:
                self._send(StepOutputs(outputs, engine.stats()))

    def _take_messages(self, engine: Engine) -> bool:
        """Handle what has come; sleeps until something comes if there is nothing to do. False at
        the end."""
        while True:
            try:
                frames = self._inbox.recv_multipart(zmq.NOBLOCK if engine.has_work else 0)
            except zmq.Again:
                return True
            message = decode(frames)
            if isinstance(message, Shutdown):
                return False
            self._handle(engine, message)

    def _handle(self, engine: Engine, message: Message) -> None:
        match message:
            case AddRequests(requests):
                for request in requests:
                    self._add(engine, request)
            case AbortRequests(rids):
                for rid in rids:
                    engine.abort(rid)
            case Call():
                self._send(_answer(engine, message))
            case _:
                raise ValueError(f"the engine does not take {type(message).__name__}")

    def _add(self, engine: Engine, request: Request) -> None:
        try:
            engine.add(request)
        except RequestError as error:
            refused = RequestRefused(request.rid, str(error), error.http_status, error.param)
            self._send(refused)

    def _beat(self) -> None:
        # Sockets belong to threads, so the beat has its own.
        outbox = self._new_outbox()
        while not self._is_over.wait(BEAT_INTERVAL_S):
            started_at = self._step_started_at
            age_s = time.monotonic() - started_at if started_at is not None else 0.0
            stats = self._engine.stats() if self._engine else EngineStats()
            outbox.send_multipart(encode(Heartbeat(age_s, stats)))

    def _die(self, reason: str, kind: str, exit_code: int) -> int:
        self._send(EngineDied(reason, exit_code, kind))
        return exit_code

    def _new_outbox(self) -> zmq.Socket[bytes]:
        outbox = self._context.socket(zmq.PUSH)
        outbox.set_hwm(0)
        outbox.connect(address(self._folder, OUTBOX))
        return outbox

    def _send(self, message: Message) -> None:
        self._outbox.send_multipart(encode(message))


def _answer(engine: Engine, call: Call) -> Reply:
    if call.name == "flush_cache":
        ok = engine.flush_cache()
        text = "Cache flushed." if ok else "The cache is in use: requests run or wait."
        return Reply(call.call_id, ok, text)
    if call.name == "state":
        return _state(engine, call)
    return Reply(call.call_id, ok=False, text=f"The engine knows no call {call.name!r}.")


def _state(engine: Engine, call: Call) -> Reply:
    integrity = "ok"
    try:
        engine.check_integrity()
    except AssertionError as error:
        integrity = str(error)
    stats = {name: getattr(engine.stats(), name) for name in EngineStats.__slots__}
    return Reply(call.call_id, integrity == "ok", integrity, {**stats, "integrity": integrity})


def _reason(phase: str, error: Exception) -> str:
    """One sentence on an unexpected end; memory errors name the cure."""
    kind = type(error).__name__
    text = f"The engine ended in {phase}: {kind}: {error}"
    if kind == "OutOfMemoryError":
        text += " Lower --mem-fraction-static or --chunked-prefill-size."
    return text
