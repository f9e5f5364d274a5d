"""Inputs of absorbed queries, and the answer head by head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tetrad.kernels.backend import Check
from tetrad.kernels.contract import Case
from tetrad.kernels.draw import Draw
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
    queries, weight = inputs["queries"].cpu().double(), inputs["weight"].cpu().double()
    width = weight.shape[1]
    absorbed = [queries[:, head, :width] @ matrix for head, matrix in enumerate(weight)]
    tail = inputs | {"x": queries[..., width:], "interleaved": True}
    return (torch.cat([torch.stack(absorbed, dim=1), *rope.expected(tail)], dim=-1),)


CHECK = Check(inputs, expected)
