"""How many threads a CPU's steps get."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tetrad.engine.child import SPIN_COUNT, environment
from tetrad.engine.device import (
    LARGE_STEP_BYTES,
    SpreadModel,
    sensible_threads,
    use_sensible_threads,
)


@pytest.fixture(autouse=True)
def _threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_few_cores_are_all_used_and_one_of_many_is_left():
    assert [sensible_threads(cores) for cores in (1, 2, 3, 4, 64)] == [1, 2, 3, 3, 63]


def test_the_environment_overrides_the_choice(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tetrad.engine.device.usable_cores", lambda: 3)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert use_sensible_threads() == 3
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert use_sensible_threads() == 1


@pytest.mark.parametrize(("num_tokens", "threads"), [(3, 1), (4, 2), (500, 2)])
def test_small_steps_run_on_one_thread(num_tokens: int, threads: int):
    """Of a model of a quarter of what makes a step large, 4 tokens are."""
    seen: list[int] = []

    class Model:
        weight_bytes = LARGE_STEP_BYTES // 4

        def __call__(self, _batch: Any, _cache: Any) -> str:
            seen.append(torch.get_num_threads())
            return "logits"

    spread: Any = SpreadModel(Model(), 2)  # type: ignore[arg-type]
    batch = SimpleNamespace(token_ids=range(num_tokens))
    assert spread(batch, None) == "logits"
    assert seen == [threads]


def test_threads_that_wait_spin_for_a_moment(monkeypatch: pytest.MonkeyPatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    ours = environment()
    assert (ours["OMP_WAIT_POLICY"], ours["GOMP_SPINCOUNT"]) == ("PASSIVE", SPIN_COUNT)
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert environment()["GOMP_SPINCOUNT"] == "7"


def test_a_team_that_waits_for_a_core_is_given_up_for_a_while():
    """Longer each time it happens again; one step that has its cores shortens the pause anew."""
    now = computed = 0.0
    share, seen = 1.0, []

    class Model:
        weight_bytes = LARGE_STEP_BYTES

        def __call__(self, _batch: Any, _cache: Any) -> None:
            nonlocal now, computed
            seen.append(torch.get_num_threads())
            now += 0.25
            computed += 0.25 * share

    spread: Any = SpreadModel(Model(), 2, lambda: now, lambda: computed)  # type: ignore[arg-type]

    def steps(count: int) -> list[int]:
        seen.clear()
        for _ in range(count):
            spread(SimpleNamespace(token_ids=range(1)), None)
        return list(seen)

    assert steps(3) == [2, 2, 2]
    share = 0.1
    assert steps(14) == [2, *[1] * 4, 2, *[1] * 8]
    share = 1.0
    assert steps(2) == [2, 2]
    share = 0.1
    assert steps(6) == [2, *[1] * 4, 2]
