"""Inputs of the sum that is normed, and the answer in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tetrad.kernels.backend import Check
from tetrad.kernels.contract import Case
from tetrad.kernels.draw import Draw
from tetrad.kernels.rms_norm import check as rms_norm


def inputs(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """All slices of wider rows, of different strides; the sum is small, so that eps counts."""
    draw = Draw.of(case, dtype, device)
    x = draw.normal(case["T"], case["W"] + 16, std=2e-3)
    residual = draw.normal(case["T"], case["W"] + 32, std=2e-3)
    more = draw.normal(case["T"], case["W"] + 48, std=2e-3) if case["more"] else None
    width = case["W"]
    return {
        "x": x[:, :width],
        "residual": residual[:, :width],
        "weight": draw.normal(width),
        "eps": case["eps"],
        "more": None if more is None else more[:, :width],
        "into": draw.normal(case["T"], width) if case.values.get("into") else None,
    }


def expected(inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """Column by column."""
    total = inputs["x"].cpu().double() + inputs["residual"].cpu().double()
    if inputs["more"] is not None:
        total += inputs["more"].cpu().double()
    return total, *rms_norm.expected(inputs | {"x": total})


CHECK = Check(inputs, expected, outputs=tuple)
