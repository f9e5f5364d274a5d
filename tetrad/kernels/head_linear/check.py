"""Inputs of the heads' linear layer, and the answer head by head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tetrad.kernels.backend import Check
from tetrad.kernels.contract import Case
from tetrad.kernels.draw import Draw


def inputs(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """x is a slice of wider heads; gain near 1."""
    draw = Draw.of(case, dtype, device)
    heads, width = case["H"], case["W"]
    return {
        "x": draw.normal(case["T"], heads, width + 16)[..., :width],
        "weight": draw.normal(heads, width, case["O"], std=width**-0.5),
    }


def expected(inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """In float64."""
    x, weight = inputs["x"].cpu().double(), inputs["weight"].cpu().double()
    return (torch.stack([x[:, head] @ matrix for head, matrix in enumerate(weight)], dim=1),)


CHECK = Check(inputs, expected)
