"""Run by test_index_triton.py, in a process where Triton interprets kernels on the CPU.

In fp32 alone: the interpreter rounds bf16 wrongly.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.index import (
    MIXED,
    SCORE,
    SELECT,
    sorted_rows,
    step_inputs,
    tied_scores,
    with_kv_lens,
)
from tetrad.core.keys import FP8
from tetrad.kernels.canary import try_case
from tetrad.kernels.compare import compare
from tetrad.kernels.contract import Case
from tetrad.kernels.index_score import triton as index_score
from tetrad.kernels.index_score.triton import ScoreTile
from tetrad.kernels.index_select import triton as index_select
from tetrad.kernels.index_select.triton import Stretch

CPU = torch.device("cpu")
NEW_EMPTY: Any = Tensor.new_empty


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read without having been written shows."""
    monkeypatch.setattr(Tensor, "new_empty", _poisoned)


def _poisoned(like: Tensor, *shape: int, **options: Any) -> Tensor:
    made: Tensor = NEW_EMPTY(like, *shape, **options)
    largest = 0xFF if made.dtype == torch.uint8 else 0x7F7F7F7F
    return made.fill_(torch.nan if made.is_floating_point() else largest)


@pytest.mark.parametrize(
    ("op", "case"),
    [
        pytest.param(op, case, id=f"{op.contract.name}-{case.name}")
        for op in (SCORE, SELECT)
        for case in op.contract.cases
    ],
)
def test_case(op: Any, case: Case):
    for result in try_case(op, op.backends["triton"], case, torch.float32, CPU):
        assert result.passes(op.contract.tolerance["float32"]), result


@pytest.mark.parametrize("each", [64, 128, 192])
@pytest.mark.parametrize("queries", [1, 4, 8])
@pytest.mark.parametrize("heads", [3, 20])
def test_every_way_to_cut_a_step(heads: int, queries: int, each: int):
    """Programs hold rows of several sequences, and rows of one sequence lie in several."""
    inputs = step_inputs(MIXED, heads, 24, torch.float32, CPU)
    found = index_score.scores(**inputs, tile=ScoreTile(queries, stages=2), each=each)
    (expected,) = SCORE.check.expected(inputs)
    assert compare(found, expected).passes(2e-6)


def test_lengths_are_those_on_the_device():
    """A padded row of a graph may have no key at all."""
    inputs = step_inputs(((1, 200),) * 5, 2, 16, torch.float32, CPU)
    kv_lens = [0, 1, 65, 128, 200]
    whole = SCORE.backends["triton"](**inputs)
    inputs["ragged"] = ragged = with_kv_lens(inputs["ragged"], kv_lens)
    found = SCORE.backends["triton"](**inputs)
    selected = SELECT.backends["triton"](found, 64, ragged.seen)
    for row, length in enumerate(kv_lens):
        assert torch.equal(found[row, :length], whole[row, :length])
        assert found[row, length:].isneginf().all()
        assert int((selected[row] >= 0).sum()) == min(length, 64)
        assert (selected[row] < length).all()


@pytest.mark.parametrize("queries", [1, 4])
def test_fp8_keys_of_steps_cut_in_every_way(queries: int):
    inputs = step_inputs(MIXED, 3, 24, torch.float32, CPU, FP8)
    found = index_score.scores(**inputs, tile=ScoreTile(queries, stages=2), each=128)
    (expected,) = SCORE.check.expected(inputs)
    assert compare(found, expected).passes(2e-6)


def test_a_nan_shows_in_its_row_alone():
    inputs = step_inputs(((3, 70), (1, 5)), 2, 16, torch.float32, CPU)
    inputs["queries"][1, 1, 3] = torch.nan
    found = SCORE.backends["triton"](**inputs)
    assert found[1, :69].isnan().all()
    assert found[1, 69:].isneginf().all()
    assert not found[[0, 2, 3]].isnan().any()


@pytest.mark.parametrize(
    "stretch", [Stretch(64, 64, 16), Stretch(64, 256, 16), Stretch(1024, 1024, 16)]
)
@pytest.mark.parametrize("num_keys", [1, 16, 63, 257, 1000])
def test_selection_in_stretches_is_that_of_the_whole_row(num_keys: int, stretch: Stretch):
    scores = tied_scores(10, num_keys, num_keys, CPU)
    seen = torch.tensor([num_keys, num_keys - 1, 0, 1, 17] * 2, dtype=torch.int32)
    seen = seen.clamp(max=num_keys)
    found = index_select.select(scores, 16, seen, stretch)
    assert torch.equal(sorted_rows(found), sorted_rows(SELECT.backends["torch"](scores, 16, seen)))


def test_positions_rise_and_what_is_missing_comes_last():
    scores = torch.tensor([[1.0, 5.0, -torch.inf, 3.0, 5.0], [0.0, 0.0, 0.0, -0.0, 0.0]])
    seen = torch.tensor([5, 2], dtype=torch.int32)
    found = SELECT.backends["triton"](scores, 4, seen)
    assert found.tolist() == [[0, 1, 3, 4], [0, 1, -1, -1]]


@pytest.mark.parametrize("num_seen", [0, 1, 63, 64])
def test_rows_of_at_most_topk_keys_get_all_of_them(num_seen: int):
    scores = tied_scores(3, 300, num_seen, CPU)[:2]
    seen = torch.full((2,), num_seen, dtype=torch.int32)
    found = index_select.select(scores, 64, seen, Stretch(64, 128, 16))
    assert found.tolist() == [[*range(num_seen), *[-1] * (64 - num_seen)]] * 2


def test_a_row_beside_others_in_memory():
    """Rows of a wider tensor, as `index_score` returns them."""
    wide = tied_scores(5, 48, 0, CPU)
    seen = torch.full((5,), 41, dtype=torch.int32)
    found = SELECT.backends["triton"](wide[:, :41], 8, seen)
    expected = SELECT.backends["torch"](wide[:, :41].contiguous(), 8, seen)
    assert torch.equal(sorted_rows(found), sorted_rows(expected))
