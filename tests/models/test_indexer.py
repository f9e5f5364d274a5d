"""When keys are scored, and that a shared layer does not score them again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.factories import tiny_glm_folder
from tests.models.driver import Driver
from tetrad.kernels import ragged
from tetrad.kernels.backend import Backend
from tetrad.kernels.ragged import Ragged
from tetrad.kernels.select import OpSet, resolve_ops
from tetrad.models.loader import load_model


def counting(ops: OpSet, scored: list[int]) -> OpSet:
    """The same ops, but each scoring enters its number of rows."""

    def run(queries: Tensor, weights: Tensor, pool: Tensor, ragged: Ragged) -> Tensor:
        scored.append(len(queries))
        scores: Tensor = ops.index_score(queries, weights, pool, ragged)
        return scores

    return replace(ops, index_score=Backend("counting", run))


@pytest.mark.parametrize(("num_tokens", "expected"), [(15, []), (16, []), (17, [17] * 3)])
def test_keys_are_scored_only_when_there_are_more_than_topk(
    num_tokens: int, expected: list[int], tmp_path: Path
):
    """Three of the four layers own an indexer; index_topk is 16."""
    scored: list[int] = []
    ops = counting(resolve_ops("cpu"), scored)
    folder = tiny_glm_folder(tmp_path)
    model = load_model(folder, device="cpu", dtype=torch.float32, ops=ops)
    Driver(model, [torch.arange(num_tokens)]).run([[(0, num_tokens)]])
    assert scored == expected


def test_keys_are_written_while_none_are_scored(tmp_path: Path):
    """Later tokens choose among them; the cache is full of NaN elsewhere."""
    scored: list[int] = []
    ops = counting(resolve_ops("cpu"), scored)
    model = load_model(tiny_glm_folder(tmp_path), device="cpu", dtype=torch.float32, ops=ops)
    prompt = [torch.arange(25)]
    (whole,) = Driver(model, prompt).run([[(0, 25)]])
    scored.clear()
    (cut,) = Driver(model, prompt).run([[(0, 12)], [(0, 4)], [(0, 9)]])
    assert scored == [9] * 3
    torch.testing.assert_close(cut, whole, rtol=0, atol=1e-4)


def test_a_prompt_scored_in_parts_gives_the_same_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A long prompt's scores are never held at once."""
    scored: list[int] = []
    ops = counting(resolve_ops("cpu"), scored)
    model = load_model(tiny_glm_folder(tmp_path), device="cpu", dtype=torch.float32, ops=ops)
    prompts = [torch.arange(40), torch.arange(50, 73)]
    steps = [[(0, 30), (1, 20)], [(0, 9), (1, 2)], [(0, 1), (1, 1)]]
    whole = Driver(model, prompts).run(steps)
    assert set(scored) == {50, 11, 2}
    scored.clear()
    monkeypatch.setattr(ragged, "MAX_PART_PAIRS", 7 * 40)
    in_parts = Driver(model, prompts).run(steps)
    assert max(scored) < 11
    torch.testing.assert_close(in_parts, whole, rtol=0, atol=1e-4)
