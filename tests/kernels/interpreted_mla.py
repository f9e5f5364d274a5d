"""Run by test_mla_triton.py, in a process where Triton interprets kernels on the CPU.

In fp32 alone: the interpreter rounds bf16 wrongly.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.mla import MLA, SMALL_CASES, Lens, drawn, without_host_lengths
from tetrad.core.keys import ACTIVATION, FP8, KeyFormat
from tetrad.core.step import PAGE_TOKENS
from tetrad.kernels.backend import Backend
from tetrad.kernels.canary import try_case
from tetrad.kernels.contract import Case, case
from tetrad.kernels.mla import triton as mla_triton
from tetrad.kernels.mla.tiles import MlaTile
from tetrad.kernels.ragged import Ragged

CPU = torch.device("cpu")
SMALL = MlaTile(heads=16, keys=16, stages=2)
TILES = (SMALL, MlaTile(heads=64, keys=64, stages=2))
NEW_EMPTY: Any = Tensor.new_empty


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read without having been written shows."""
    monkeypatch.setattr(Tensor, "new_empty", _poisoned)


def _poisoned(like: Tensor, *shape: int, **options: Any) -> Tensor:
    made: Tensor = NEW_EMPTY(like, *shape, **options)
    return made.fill_(torch.nan) if made.is_floating_point() else made


def small(name: str, lens: Lens, heads: int, topk: int, keys: KeyFormat = ACTIVATION) -> Case:
    return case(name, lens=lens, H=heads, C=16, R=8, topk=topk, keys=keys)


def backend(tile: MlaTile, splits: int) -> Backend:
    return Backend("triton", partial(mla_triton.attend, tile=tile, num_splits=splits))


@pytest.mark.parametrize("splits", [1, 3, 16])
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.heads}x{tile.keys}")
@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.name)
def test_case(case: Case, tile: MlaTile, splits: int):
    (result,) = try_case(MLA, backend(tile, splits), case, torch.float32, CPU)
    assert result.passes(MLA.contract.tolerance["float32"]), result


@pytest.mark.parametrize(("tile", "splits"), [(SMALL, 2), (TILES[1], 1)])
@pytest.mark.parametrize("keys", [ACTIVATION, FP8])
def test_glm_widths(keys: KeyFormat, tile: MlaTile, splits: int):
    glm = case("narrow glm", lens=((1, 100), (2, 20)), H=20, C=512, R=64, topk=0, keys=keys)
    (result,) = try_case(MLA, backend(tile, splits), glm, torch.float32, CPU)
    assert result.passes(MLA.contract.tolerance["float32"]), result


@pytest.mark.parametrize("topk", [0, 16])
@pytest.mark.parametrize("splits", [1, 4])
def test_host_lengths_are_not_read(splits: int, topk: int):
    lens = ((1, 65), (1, 3), (1, 200), (1, 0))
    inputs = drawn(small("graph", lens, 4, topk), CPU, torch.float32)
    expected = MLA.backends["torch"].run(**inputs)
    run = backend(SMALL, splits).run
    torch.testing.assert_close(run(**without_host_lengths(inputs)), expected)


def test_rows_behind_the_last_sequence_are_zeros():
    """A graph has a fixed number of rows, of which a step may have fewer."""
    inputs = drawn(small("rows", ((2, 70), (3, 5)), 4, 8), CPU, torch.float32)
    expected = MLA.backends["torch"].run(**inputs)
    more = torch.full((2, 4, 24), torch.nan)
    inputs["queries"] = torch.cat([inputs["queries"], more])
    inputs["selected"] = torch.cat([inputs["selected"], inputs["selected"][:2]])
    found = backend(SMALL, 2).run(**inputs)
    torch.testing.assert_close(found[:5], expected)
    assert not found[5:].any()


@pytest.mark.parametrize("splits", [1, 3])
def test_nothing_stands_anywhere_in_a_selection(splits: int):
    """Not only at its end, and whole tiles of it; a position that is not seen counts as nothing."""
    inputs = drawn(small("gaps", ((1, 300),) * 3, 4, 64), CPU, torch.float32)
    selected = inputs["selected"]
    selected[0, :40] = -1
    selected[1, ::3] = -1
    selected[2] = -1
    expected = MLA.backends["torch"].run(**inputs)
    selected[0, 3], selected[1, 0] = 300, 5000
    found = backend(SMALL, splits).run(**inputs)
    torch.testing.assert_close(found, expected)
    assert not found[2].any()


def test_a_key_that_is_not_finite_shows_in_its_row_alone():
    inputs = drawn(small("nan", ((1, 70), (1, 70)), 4, 0), CPU, torch.float32)
    page = int(inputs["ragged"].page_table[1, 1])
    inputs["pool"][page, 3, 5] = torch.nan
    found = backend(SMALL, 3).run(**inputs)
    assert found[0].isfinite().all()
    assert found[1].isnan().all()


@pytest.mark.parametrize("splits", [1, 3])
def test_every_fp8_code_is_decoded(splits: int):
    """A sequence of 256 keys has each of them, in every column, with scales far apart."""
    inputs = drawn(small("codes", ((1, 256),), 4, 0, FP8), CPU, torch.float32)
    row_bytes = inputs["pool"].shape[-1]
    rows = inputs["pool"].view(-1, row_bytes)
    pages = inputs["ragged"].page_table[0].long()
    slots = (pages[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).flatten()
    codes = (torch.arange(256)[:, None] + 37 * torch.arange(16)) % 256
    codes[codes % 128 == 127] = 5
    values = codes.to(torch.uint8)
    scales = torch.pow(2.0, torch.arange(256) % 7 - 3).float()
    rows[slots, :16] = values
    rows[slots, 16:20] = scales.view(torch.uint8).view(256, 4)
    inputs["queries"] *= 0.01
    (expected,) = MLA.check.expected(inputs)
    found = backend(SMALL, splits).run(**inputs)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_an_fp8_scale_that_is_not_finite_shows_in_its_row_alone():
    inputs = drawn(small("nan scale", ((1, 70), (1, 70)), 4, 0, FP8), CPU, torch.float32)
    page = int(inputs["ragged"].page_table[1, 1])
    inputs["pool"][page, 3, 16:20] = 0xFF
    found = backend(SMALL, 3).run(**inputs)
    assert found[0].isfinite().all()
    assert found[1].isnan().all()


def test_more_sequences_than_are_searched_together():
    lens = ((1, 3),) * 130 + ((2, 40), (1, 1))
    inputs = drawn(small("many", lens, 2, 0), CPU, torch.float32)
    expected = MLA.backends["torch"].run(**inputs)
    torch.testing.assert_close(backend(SMALL, 1).run(**inputs), expected)


def test_scores_far_apart_neither_overflow_nor_vanish():
    inputs = drawn(small("steep", ((1, 150),), 4, 0), CPU, torch.float32)
    inputs["queries"] *= 1000
    expected = MLA.backends["torch"].run(**inputs)
    torch.testing.assert_close(backend(SMALL, 4).run(**inputs), expected, rtol=1e-4, atol=1e-4)


def test_pages_past_two_to_the_31st_element(monkeypatch: pytest.MonkeyPatch):
    """The pool is a view of numbers that were never touched, but for two pages."""
    width = 24
    num_pages = (1 << 31) // (PAGE_TOKENS * width) + 100
    pool = torch.empty(num_pages, PAGE_TOKENS, width, dtype=torch.float32)
    far = torch.tensor([[num_pages - 3, 7]], dtype=torch.int32)
    for page in far.flatten().tolist():
        pool[page] = torch.randn(PAGE_TOKENS, width)
    ragged = Ragged(
        torch.tensor([0, 1], dtype=torch.int32), torch.tensor([100], dtype=torch.int32), far,
        (1,), (100,),
    )  # fmt: skip
    queries = torch.randn(1, 3, width)
    chosen = torch.arange(99, 19, -1, dtype=torch.int32).view(1, -1)
    for selected in (None, chosen):
        expected = MLA.backends["torch"].run(queries, pool, ragged, selected, 0.2, 16)
        found = backend(SMALL, 2).run(queries, pool, ragged, selected, 0.2, 16)
        torch.testing.assert_close(found, expected)
