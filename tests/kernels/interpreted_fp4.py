"""Run by test_experts_fp4.py, in a process where Triton interprets kernels on the CPU.

The interpreter takes every scale of `tl.dot_scaled` for a power of two, so codes are decoded and
multiplied in fp32 instead: all but that one instruction is what a GPU runs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.experts import draw_experts
from tetrad.kernels.experts.check_w4a4 import rounding
from tetrad.kernels.experts.fp4_tiles import Fp4Tile
from tetrad.kernels.experts.triton_fp4 import Fp4Experts, in_four_bits, prepare

CPU = torch.device("cpu")
NEW_EMPTY: Any = Tensor.new_empty

CASES: dict[str, dict[str, Any]] = {
    "filled up to whole tiles": {},
    "odd sizes": {"hidden": 96, "width": 48},
    "several steps and columns of tiles": {"hidden": 528, "width": 272, "experts": 2, "tokens": 3},
    "dropped slots": {"dropped": 0.4},
    "everything dropped": {"dropped": 1.0},
    "one expert has every token": {"used": 2, "tokens": 40},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_experts(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    drawn = draw_experts(CPU, **case)
    weight = prepare(drawn.weight, torch.bfloat16)
    assert isinstance(weight, Fp4Experts)
    ids, slot_weights, shared, residual = drawn.routed
    arguments = {"x": drawn.x, "weight": drawn.weight, "ids": ids, "slot_weights": slot_weights}
    (truth,) = rounding(None).expected(arguments | {"shared": shared, "residual": residual})
    monkeypatch.setattr(Tensor, "new_empty", _poisoned)
    y = in_four_bits(drawn.x, weight, drawn.routed, Fp4Tile(16), is_native=False)
    torch.testing.assert_close(y.double(), truth, rtol=2e-5, atol=2e-4)


def _poisoned(like: Tensor, *shape: int, **options: object) -> Tensor:
    """What is read without having been written shows, except in padding rows that nobody reads."""
    made: Tensor = NEW_EMPTY(like, *shape, **options)
    if made.dtype == torch.float8_e4m3fn:
        made.view(torch.uint8).fill_(0x7E)
        return made
    return made.fill_(1e30 if made.is_floating_point() else 7)
