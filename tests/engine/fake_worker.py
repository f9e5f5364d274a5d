"""An engine process with the fake runner, for tests of the loop and the client.

What it does is asked for by tokens of the prompt, since a process cannot be patched.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

from tests.engine.fakes import Done, FakeRunner, make_limits, make_scheduler
from tetrad.core.config import ServeConfig
from tetrad.core.errors import CheckpointError
from tetrad.core.messages import EngineProgress
from tetrad.core.plan import StepPlan
from tetrad.engine.client import EngineClient
from tetrad.engine.engine import Engine
from tetrad.engine.grammars import Masks
from tetrad.engine.process import main

RAISES, KILLED, STUCK, SPOILED = 31, 32, 33, 34
"""First token of a prompt that makes the step raise, die by SIGKILL, sleep, or give NaN."""


class FakeEngineClient(EngineClient):
    """Starts this file instead of the real engine."""

    worker_module = "tests.engine.fake_worker"


class WilfulRunner(FakeRunner):
    def launch(self, plan: StepPlan, masks: Callable[[], Masks | None] | None = None) -> Done:
        for work in plan.sequences:
            if work.start == 0:
                self._obey(work.token_ids[0], work.rid)
        return super().launch(plan, masks)

    def _obey(self, token_id: int, rid: str) -> None:
        if token_id == RAISES:
            raise RuntimeError("the fake kernel broke")
        if token_id == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        if token_id == STUCK:
            time.sleep(60)
        if token_id == SPOILED:
            self.spoiled.add(rid)


def load(config: ServeConfig, on_progress: Callable[[EngineProgress], None]) -> Engine:
    on_progress(EngineProgress("weights", "none"))
    match config.served_model_name:
        case "bad":
            raise CheckpointError("the folder holds no model.")
        case "broken":
            raise RuntimeError("cannot load")
        case "slow":
            time.sleep(60)
    limits = make_limits(16)
    return Engine(make_scheduler(limits), WilfulRunner(16), {"pid": os.getpid()})


if __name__ == "__main__":
    sys.exit(main(load))
