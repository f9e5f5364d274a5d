"""The engine without a model."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from pathlib import Path

from tests.engine.fakes import make_request
from tetrad.core.config import ServeConfig
from tetrad.core.plan import StepPlan
from tetrad.core.presets import preset
from tetrad.engine.client import EngineClient
from tetrad.engine.engine import Engine
from tetrad.engine.null import NullRunner, load_null, scripted_token

GLM = preset("glm-5")


def load(**flags: object) -> Engine:
    config = {"model": Path("glm-5"), "load_format": "null", "null_step_ms": 0.0}
    return load_null(ServeConfig(**config | flags), lambda _progress: None)  # type: ignore[arg-type]


def answers(engine: Engine) -> dict[str, list[int]]:
    told: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            told.setdefault(output.rid, []).extend(output.token_ids)
    return told


def test_every_stream_is_as_its_seed_and_place_say():
    engine = load(max_running_requests=3)
    for seed in range(7):
        engine.add(make_request(f"{seed}", list(range(5, 80 + seed)), 30, seed=seed))
    told = answers(engine)
    ends = frozenset(GLM.eos_ids)
    for seed in range(7):
        assert told[f"{seed}"] == [scripted_token(seed, n, GLM.vocab, ends) for n in range(30)]
    engine.check_integrity()


def test_a_script_visits_the_whole_vocabulary():
    told = [scripted_token(3, place, 100, frozenset()) for place in range(100)]
    assert told[:3] == [3, 22, 41]
    assert sorted(told) == list(range(100))


def test_no_stream_ends_by_itself():
    """A token that would end it is never scripted."""
    end = GLM.eos_ids[0]
    token = scripted_token(end, 0, GLM.vocab, frozenset(GLM.eos_ids))
    assert token == end + 1
    engine = load()
    engine.add(make_request("a", [1, 2], 5, seed=end))
    assert len(answers(engine)["a"]) == 5


def test_steps_take_their_time():
    """Each is due a step after the one before, however late the host launched it."""
    runner = NullRunner(GLM.vocab, GLM.eos_ids, step_s=0.005)
    due_at = [runner.launch(StepPlan(())).due_at for _ in range(5)]
    gaps = [after - before for before, after in itertools.pairwise(due_at)]
    assert min(gaps) >= 0.005 - 1e-9
    began_at = time.monotonic()
    runner.launch(StepPlan(())).wait()
    assert time.monotonic() - began_at >= 0.005


def test_it_needs_no_torch():
    code = "import sys, tetrad.engine.null_worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_a_server_s_client_starts_it():
    config = ServeConfig(
        model=Path("glm-5"), load_format="null", null_step_ms=0.0, max_running_requests=2
    )
    client = await EngineClient.start(config)
    try:
        request = make_request("a", [1, 2, 3], 6, seed=11)
        told = [token async for output in client.generate(request) for token in output.token_ids]
        ends = frozenset(GLM.eos_ids)
        assert told == [scripted_token(11, n, GLM.vocab, ends) for n in range(6)]
        assert client.info["load_format"] == "null"
    finally:
        await client.stop()
