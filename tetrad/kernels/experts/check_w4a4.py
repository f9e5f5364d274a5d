"""The experts' answer where their products take activations in NVFP4: token by token in float64.

Rows are rounded twice: those of the layer, and what the activation leaves for the down projection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tetrad.formats import nvfp4
from tetrad.kernels.backend import Rounding
from tetrad.kernels.experts.weights import ExpertWeights

MEANING = "rounds activations to NVFP4, which changes answers"


def rounding(global_scale: float | None) -> Rounding:
    """With one global scale for all rows, or None: with one for each row.

    The tolerance is for codes that flip. Backends round from values that differ from the exact ones
    by the rounding of bfloat16, so about one code in a hundred becomes its neighbour.
    """
    return Rounding(
        MEANING,
        lambda inputs: _expected(inputs, lambda row: _rounded(row, global_scale)),
        tolerance={"float32": TOLERANCE, "bfloat16": TOLERANCE},
        deviation=DEVIATION,
    )


TOLERANCE = 0.05
DEVIATION = 0.25
"""Gaussian rows and weights alone come to 0.13 to 0.21."""


def _rounded(row: Tensor, global_scale: float | None) -> Tensor:
    """float64 [n]: what NVFP4 makes of `row`; its rest in the last block is filled with zeros."""
    padded = torch.nn.functional.pad(row.float(), (0, -len(row) % 16))[None]
    scale = None if global_scale is None else torch.tensor(global_scale)
    return nvfp4.quantize(padded, scale).dequantize(torch.float64)[0, : len(row)]


def _expected(inputs: dict[str, Any], round_row: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    stored: ExpertWeights = inputs["weight"]
    gate, up, down = (
        w.dequantize(torch.float64).cpu() for w in (stored.gate, stored.up, stored.down)
    )
    slot_weights = inputs["slot_weights"].cpu().double()
    x = torch.stack([round_row(row) for row in inputs["x"].cpu()])
    out = torch.zeros_like(x)
    for added in (inputs["shared"], inputs["residual"]):
        if added is not None:
            out += added.cpu().double()
    for token, experts in enumerate(inputs["ids"].tolist()):
        for slot, expert in enumerate(experts):
            if expert < 0:
                continue
            gated = gate[expert] @ x[token]
            hidden = gated / (1.0 + (-gated).exp()) * (up[expert] @ x[token])
            out[token] += slot_weights[token, slot] * (down[expert] @ round_row(hidden))
    return (out,)
