"""Inputs of the linear layer, and the answer in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tetrad.kernels.backend import Check
from tetrad.kernels.contract import Case
from tetrad.kernels.draw import Draw


def inputs(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """One matrix in the case's format."""
    draw = Draw.of(case, dtype, device)
    weight = draw.weight(case["format"], case["out"], case["width"])
    return {"x": draw.normal(case["T"], case["width"]), "weight": weight}


def expected(inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """Output by output: a sum of products of decoded values."""
    weight = inputs["weight"].dequantize(torch.float64).cpu()
    x = inputs["x"].cpu().double()
    return (torch.stack([(x * row).sum(-1) for row in weight], dim=1),)


CHECK = Check(inputs, expected)
