"""Inputs of the rotary embedding, and the answer pair by pair."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tetrad.kernels.backend import Check
from tetrad.kernels.contract import Case
from tetrad.kernels.draw import Draw


def inputs(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """x is the tail of wider rows, as the rotary part of a query is."""
    draw = Draw.of(case, dtype, device)
    tokens = case["T"]
    angles = draw.normal(tokens, case["R"] // 2, dtype=torch.float32, std=3.0)
    return {
        "x": draw.normal(tokens, case["H"], case["W"] + 16)[..., 16:],
        "cos": angles.cos(),
        "sin": angles.sin(),
        "interleaved": case["interleaved"],
    }


def expected(inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """Each pair (a, b) becomes (a cos - b sin, b cos + a sin)."""
    x = inputs["x"].cpu().double()
    cos, sin = (inputs[name].cpu().double()[:, None, :] for name in ("cos", "sin"))
    num_pairs = cos.shape[-1]
    out = x.clone()
    for i in range(num_pairs):
        a, b = (2 * i, 2 * i + 1) if inputs["interleaved"] else (i, i + num_pairs)
        out[..., a] = x[..., a] * cos[..., i] - x[..., b] * sin[..., i]
        out[..., b] = x[..., b] * cos[..., i] + x[..., a] * sin[..., i]
    return (out,)


CHECK = Check(inputs, expected)
