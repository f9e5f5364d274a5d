"""Inputs of absorbed queries, and the answers of the two ops that they stand for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tetrad.kernels.backend import Check
from tetrad.kernels.contract import Case
from tetrad.kernels.draw import Draw
from tetrad.kernels.head_linear import check as head_linear
from tetrad.kernels.rope import check as rope


def inputs(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Both parts of the answer come out about as large."""
    draw = Draw.of(case, dtype, device)
    tokens, heads, width = case["T"], case["H"], case["N"]
    angles = draw.normal(tokens, case["R"] // 2, dtype=torch.float32, std=3.0)
    return {
        "queries": draw.normal(tokens, heads, width + case["R"]),
        "weight": draw.normal(heads, width, case["C"], std=width**-0.5),
        "cos": angles.cos(),
        "sin": angles.sin(),
    }


def expected(inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """In float64."""
    queries, width = inputs["queries"], inputs["weight"].shape[1]
    absorbed = head_linear.expected(inputs | {"x": queries[..., :width]})
    turned = rope.expected(inputs | {"x": queries[..., width:], "interleaved": True})
    return (torch.cat([*absorbed, *turned], dim=-1),)


CHECK = Check(inputs, expected)
