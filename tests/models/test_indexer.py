"""When keys are scored, and that a shared layer does not score them again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.factories import tiny_glm_folder
from tests.models.driver import Driver
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
