"""Run by test_experts_triton.py, in a process where Triton interprets kernels on the CPU.

In fp32 alone: the interpreter rounds bf16 wrongly.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.experts import Drawn, draw_experts
from tests.kernels.test_experts_packing import drawn as drawn_stack
from tetrad.kernels.experts import packing, triton_packing
from tetrad.kernels.experts.grouping import in_groups
from tetrad.kernels.experts.tiles import TileShape
from tetrad.kernels.experts.triton import grouped

NEW_EMPTY: Any = Tensor.new_empty

CASES: dict[str, dict[str, Any]] = {
    "packed": {},
    "odd sizes": {"hidden": 96, "width": 48},
    "wide steps": {"hidden": 256, "width": 128, "columns": 128},
    "dropped slots": {"dropped": 0.4},
    "everything dropped": {"dropped": 1.0},
    "one expert has every token": {"used": 2, "tokens": 40},
    "dense": {"format_name": "bf16"},
    "fp8": {"format_name": "fp8_block"},
    "fp8 odd sizes": {"format_name": "fp8_block", "hidden": 37, "width": 151},
    "fp8 wide steps": {"format_name": "fp8_block", "hidden": 256, "width": 136, "columns": 128},
    "fp8 with a scale a matrix": {"format_name": "fp8_tensor", "hidden": 160, "dropped": 0.4},
    "packed with fp8 down": {"down_format_name": "fp8_tensor"},
    "dense odd sizes": {"format_name": "bf16", "hidden": 37, "width": 21},
}

PACKED = [(128, 64, 1), (200, 80, 1), (64, 128, 2), (72, 96, 2)]
"""Rows and columns of each matrix, and how many are joined: whole tiles and parts of them."""


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_experts(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    options = {"columns": 64} | case
    tile = TileShape(16, int(options.pop("columns")), stages=2)
    drawn: Drawn = draw_experts(torch.device("cpu"), **options)
    monkeypatch.setattr(Tensor, "new_empty", _poisoned)
    product = in_groups(drawn.x, drawn.prepared, drawn.routed, tile, (8, 0), grouped)
    torch.testing.assert_close(product.double(), drawn.expected(), rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "columns", "parts"), PACKED)
def test_packing_in_one_launch(rows: int, columns: int, parts: int):
    stacks = tuple(drawn_stack(2, rows, columns, seed) for seed in range(parts))
    stacks[0].scales.view(torch.uint8)[0, :4, 0] = torch.tensor([0, 0x80, 0x7F, 0xFF])
    plain, launched = packing.pack(stacks), triton_packing.launch(stacks)
    assert torch.equal(plain.words, launched.words)
    assert torch.equal(plain.scales, launched.scales)
    assert torch.equal(plain.global_scale, launched.global_scale)


def _poisoned(like: Tensor, *shape: int, **options: object) -> Tensor:
    """What is read without having been written shows, except in padding rows that nobody reads."""
    made: Tensor = NEW_EMPTY(like, *shape, **options)
    return made.fill_(1e30 if made.is_floating_point() else -7)
