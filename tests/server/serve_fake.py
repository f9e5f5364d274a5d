"""`tetrad.server.process.launch.run` with a fake engine, as a process of its own: tests signal it.

Arguments: configuration as JSON, and what the engine does ("normal", "slow to load", "refuses",
"dies", "sticks", "endless").
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence

from tests.server.fake_engine import FakeEngine, Step, saying
from tetrad.core.config import ServeConfig
from tetrad.core.errors import CheckpointError
from tetrad.core.messages import EngineProgress
from tetrad.core.request import Request
from tetrad.server.process.launch import run


async def start(config: ServeConfig, on_progress: Callable[[EngineProgress], None]) -> FakeEngine:
    behaviour = sys.argv[2]
    on_progress(EngineProgress("Loading", "weights"))
    if behaviour == "slow to load":
        await asyncio.sleep(1000)
    if behaviour == "refuses":
        raise CheckpointError("model.norm.weight is missing.")
    engine = FakeEngine()
    engine.step_s = 0.01
    if behaviour in ("dies", "sticks", "endless"):
        engine.script = saying([18] * 100_000)
        engine.info["context_length"] = engine.info["max_total_tokens"] = 1_000_000
    if behaviour == "dies":
        endless, loop = engine.script, asyncio.get_running_loop()

        def fatal(request: Request) -> Sequence[Step]:
            loop.call_later(0.2, engine.kill, "The engine ran out of luck.")
            return endless(request)

        engine.script = fatal
    if behaviour == "sticks":
        engine.step_age_s = 2.0
    return engine


if __name__ == "__main__":
    config = ServeConfig.parse({"api_workers": 1} | json.loads(sys.argv[1]))
    code = run(config, start, has_annex=False)  # it could not reach the engine
    assert "torch" not in sys.modules
    assert "transformers" not in sys.modules
    sys.exit(code)
