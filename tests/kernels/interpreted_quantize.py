"""Run by test_experts_quantize.py, in a process where Triton interprets kernels on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.rows import difficult_rows, reference_rows
from tetrad.kernels.experts.triton_quantize import quantize_rows


@pytest.mark.parametrize("width", [16, 48, 512, 1040])
def test_number_for_number_what_the_format_says(width: int):
    x = difficult_rows(12, width)
    ours, theirs = quantize_rows(x), reference_rows(x)
    assert torch.equal(ours.row_scale, theirs.row_scale)
    assert torch.equal(ours.scales.view(torch.uint8), theirs.scales.view(torch.uint8))
    assert torch.equal(ours.codes, theirs.codes)


def test_columns_are_filled_with_zeros():
    x = difficult_rows(8, 40)
    ours = quantize_rows(x, padded_width=128)
    theirs = reference_rows(torch.nn.functional.pad(x, (0, 88)))
    assert torch.equal(ours.codes, theirs.codes)
    assert torch.equal(ours.scales.view(torch.uint8), theirs.scales.view(torch.uint8))


def test_positions_without_a_row_are_left_out(monkeypatch: pytest.MonkeyPatch):
    x = difficult_rows(8, 32)
    made = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: made(*a, **k).fill_(7))
    ours = quantize_rows(x, rows=torch.tensor([3, -1] * 4, dtype=torch.int32))
    theirs = reference_rows(x)
    assert torch.equal(ours.codes[::2], theirs.codes[::2])
    assert ours.codes[1::2].eq(7).all()


def test_a_row_with_a_nan_is_told_by_its_scale():
    x = torch.ones(3, 32)
    x[1, 5] = torch.nan
    assert quantize_rows(x).row_scale.isnan().tolist() == [False, True, False]
