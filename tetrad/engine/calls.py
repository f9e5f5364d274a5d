"""Engine calls from API processes other than requests: state queries and admin commands."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from msgspec import structs

from tetrad.core.errors import UserError
from tetrad.core.messages import Call, LogSettings, Message, Reply
from tetrad.engine.engine import Engine
from tetrad.engine.gains import Gains

_log = logging.getLogger(__name__)

Answer = tuple[bool, str, dict[str, Any]]
"""Whether it was done, a sentence, and data."""


class Calls:
    """Answers calls to one engine. `hand_out` takes what requests get to their owners, `tell_all` a
    message to every API process."""

    def __init__(
        self,
        engine: Engine,
        hand_out: Callable[[Gains], None],
        tell_all: Callable[[Message], None],
    ) -> None:
        self._engine = engine
        self._hand_out = hand_out
        self._tell_all = tell_all
        self._known: dict[str, Callable[..., Answer]] = {
            "flush_cache": self._flush_cache,
            "state": self._state,
            "abort": self._abort,
            "pause": self._pause,
            "resume": self._resume,
            "start_profile": self._start_profile,
            "stop_profile": self._stop_profile,
            "set_logging": self._set_logging,
        }

    def answer(self, call: Call) -> Reply:
        """Do what a call says; what cannot be done is told in the reply."""
        if call.name not in self._known:
            return Reply(call.call_id, ok=False, text=f"The engine knows no call {call.name!r}.")
        try:
            ok, text, data = self._known[call.name](**call.arguments)
        except UserError as error:
            return Reply(call.call_id, ok=False, text=str(error))
        return Reply(call.call_id, ok, text, data)

    def _flush_cache(self) -> Answer:
        ok = self._engine.flush_cache()
        return ok, "Cache flushed." if ok else "The cache is in use: requests run or wait.", {}

    def _state(self) -> Answer:
        integrity = "ok"
        try:
            self._engine.check_integrity()
        except AssertionError as error:
            integrity = str(error)
        stats = structs.asdict(self._engine.stats())
        data = {**stats, "integrity": integrity, "is_paused": self._engine.is_paused}
        return integrity == "ok", integrity, data

    def _abort(self, rid: str | None) -> Answer:
        ended = self._engine.end(rid)
        self._hand_out(ended)
        _log.info("%d requests were aborted on demand", len(ended))
        return True, "", {"num_aborted": len(ended)}

    def _pause(self, mode: str) -> Answer:
        self._hand_out(self._engine.pause())
        if mode == "abort":
            self._hand_out(self._engine.end(None))
        elif mode == "retract":
            self._engine.set_back()
        _log.info("generation is paused (%s)", mode)
        return True, "", {}

    def _resume(self) -> Answer:
        self._engine.resume()
        _log.info("generation continues")
        return True, "", {}

    def _start_profile(self, num_steps: int | None) -> Answer:
        self._engine.profiler.start(num_steps)
        return True, "", {}

    def _stop_profile(self) -> Answer:
        path = self._engine.profiler.stop()
        return True, path, {"path": path}

    def _set_logging(self, log_level: str | None, access_log: str | None) -> Answer:
        if log_level is not None:
            logging.getLogger().setLevel(log_level.upper())
        self._tell_all(LogSettings(log_level, access_log))
        return True, "", {}
