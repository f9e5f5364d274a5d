"""Inputs of the RMS norm, and the answer column by column."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tetrad.kernels.backend import Check
from tetrad.kernels.contract import Case
from tetrad.kernels.draw import Draw


def inputs(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """x is a slice of wider rows and small, so that eps counts."""
    draw = Draw.of(case, dtype, device)
    wide = draw.normal(case["T"], case["W"] + 3, std=3e-3)
    return {"x": wide[:, : case["W"]], "weight": draw.normal(case["W"]), "eps": case["eps"]}


def expected(inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """Row by row in float64."""
    weight = inputs["weight"].cpu().double()
    rows = []
    for row in inputs["x"].cpu().double():
        mean_square = sum(value * value for value in row.tolist()) / len(row)
        rows.append(row / (mean_square + inputs["eps"]) ** 0.5 * weight)
    return (torch.stack(rows),)


CHECK = Check(inputs, expected)
