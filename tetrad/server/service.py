"""What all routes share: the model, the engine once it is there, and the door."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Literal

from tetrad.core.config import ServeConfig
from tetrad.core.errors import CapacityError, EngineDiedError, TetradError
from tetrad.server.door.access import Keys
from tetrad.server.door.arrival import arrival
from tetrad.server.door.gate import Admission, Gate
from tetrad.server.engine_port import EnginePort
from tetrad.server.model import ServedModel
from tetrad.server.shared.beat import SILENCE_LIMIT_S, why_unwell
from tetrad.server.shared.shelf import Shelf
from tetrad.server.shared.tally import OPEN, UNANSWERED, Tally
from tetrad.server.telemetry.metrics import Metrics
from tetrad.server.telemetry.reporter import Reporter

Phase = Literal["starting", "ready", "draining", "dead"]

RETRY_AFTER_S: dict[Phase, int] = {"starting": 5, "ready": 1, "draining": 30, "dead": 30}


class Service:
    """State of one API process, which may be one of several."""

    def __init__(
        self,
        config: ServeConfig,
        model: ServedModel,
        tally: Tally | None = None,
        shelf: Shelf | None = None,
    ) -> None:
        """`tally` and `shelf` are shared by the API processes of a server."""
        self.config = config
        self.model = model
        self.tally = tally or Tally()
        self.shelf = shelf if config.max_stored_responses else None
        """Responses that can be asked for again; None if none are kept."""
        if shelf is None and config.max_stored_responses:
            self.shelf = Shelf(config.max_stored_responses)
        self.background: set[asyncio.Task[None]] = set()
        """Responses that are computed without a connection."""
        self.metrics = Metrics(self.tally, model.name)
        self.reporter = Reporter(config)
        self.keys = Keys.of(config)
        self._gate = Gate(config, self.tally, self.keys.names)
        self.phase: Phase = "starting"
        self.detail = ""
        """What is being done while starting, or why the engine died."""
        self.started_at = time.time()
        """By the wall clock, to be shown; whatever is measured goes by the monotonic one."""
        self._began_at = time.monotonic()
        self.startup_s = 0.0
        self.command: tuple[str, ...] = tuple(sys.argv)
        """How the server was started."""
        self._engine: EnginePort | None = None

    @property
    def age_s(self) -> float:
        """Seconds since this process began to serve or to start."""
        return time.monotonic() - self._began_at

    @property
    def open_requests(self) -> int:
        """Engine requests in flight, of all API processes."""
        return int(self.tally.total(OPEN))

    @property
    def unanswered_requests(self) -> int:
        """Those of them without a first token."""
        return int(self.tally.total(UNANSWERED))

    def attach(self, engine: EnginePort, *, is_ready: bool = True) -> None:
        """The engine is ready: serve. Unless `is_ready` the server is not said to be healthy yet,
        because others are not ready."""
        self._engine = engine
        engine.on_log_settings = self.reporter.obey
        self.metrics.watch(engine)
        if is_ready:
            self.be_ready(self.age_s)

    def be_ready(self, startup_s: float) -> None:
        """All of the server is ready, after so long."""
        self.startup_s = startup_s
        self.phase = "ready"

    def fail(self, reason: str) -> None:
        """The engine has died: nothing is served any more."""
        self.phase = "dead"
        self.detail = reason

    def why_ended(self, error: EngineDiedError) -> TetradError:
        """What the client of an open request is told when the engine is gone."""
        if self.phase == "draining":
            return CapacityError(
                "The server shut down before this request was finished.",
                retry_after_s=RETRY_AFTER_S["draining"],
            )
        return EngineDiedError(self.detail) if self.phase == "dead" else error

    @property
    def engine(self) -> EnginePort:
        """The engine. Raises CapacityError (503) before it is ready and after it has died."""
        if self._engine is None:
            raise CapacityError(
                f"The model is still loading: {self.detail or 'starting'}.",
                retry_after_s=RETRY_AFTER_S[self.phase],
            )
        if self.phase == "dead":
            raise EngineDiedError(self.detail)
        return self._engine

    @property
    def why_unhealthy(self) -> str | None:
        """None when requests are served; judged by the engine's heartbeat, not by its queue."""
        if self.phase != "ready" or self._engine is None:
            return f"{self.phase}: {self.detail}" if self.detail else self.phase
        if (age_s := self._engine.last_beat_age_s) > SILENCE_LIMIT_S:
            return f"the engine has been silent for {age_s:.0f} s"
        if (age_s := self._engine.step_age_s) > self.config.watchdog_timeout:
            return f"the engine's step has been running for {age_s:.0f} s"
        return why_unwell(self.tally)

    def let_in(self, prompt_lens: Sequence[int]) -> Admission:
        """Count engine requests in, one for each prompt's number of tokens. Raises CapacityError
        when they may not come in."""
        engine = self.engine
        if self.phase == "draining":
            raise CapacityError(
                "The server is shutting down and takes no new requests.",
                retry_after_s=RETRY_AFTER_S["draining"],
            )
        return self._gate.let_in(engine, arrival().key_name, prompt_lens)

    @contextlib.contextmanager
    def admit(self, prompt_lens: Sequence[int]) -> Iterator[Admission]:
        """Count engine requests in and out, unless they have been let in already. Raises
        CapacityError when they may not come in."""
        told = arrival()
        admission, told.admission = told.admission, None
        if admission is None:
            admission = self.let_in(prompt_lens)
        try:
            yield admission
        finally:
            admission.leave()
