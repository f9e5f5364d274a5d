"""Inputs of the layer norm, and the answer row by row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tetrad.kernels.backend import Check
from tetrad.kernels.contract import Case
from tetrad.kernels.draw import Draw


def inputs(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """x has a mean, and a spread so small that eps counts."""
    draw = Draw.of(case, dtype, device)
    width = case["W"]
    return {
        "x": draw.normal(case["T"], width, std=3e-3) + 0.01,
        "weight": draw.normal(width, dtype=torch.float32),
        "bias": draw.normal(width, dtype=torch.float32),
        "eps": 1e-6,
    }


def expected(inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """Row by row in float64."""
    weight, bias = inputs["weight"].cpu().double(), inputs["bias"].cpu().double()
    rows = []
    for row in inputs["x"].cpu().double():
        mean = sum(map(float, row)) / len(row)
        variance = sum((float(value) - mean) ** 2 for value in row) / len(row)
        rows.append((row - mean) / (variance + inputs["eps"]) ** 0.5 * weight + bias)
    return (torch.stack(rows),)


CHECK = Check(inputs, expected)
