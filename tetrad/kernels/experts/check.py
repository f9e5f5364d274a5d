"""Inputs of the routed experts, and the answer token by token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tetrad.kernels.backend import Check
from tetrad.kernels.contract import Case
from tetrad.kernels.draw import Draw
from tetrad.kernels.experts.weights import ExpertWeights


def inputs(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Tokens choose among the first `used` experts; the others stay empty. Where a case has
    `rows_per_expert`, that many rows of one slot each go to each expert. The residual is small:
    errors of the experts are not to drown in it."""
    draw = Draw.of(case, dtype, device)
    tokens, experts, hidden, width = case["T"], case["E"], case["D"], case["F"]
    if "rows_per_expert" in case.values:
        ids = draw.dealt(case["rows_per_expert"])
    else:
        ids = draw.choices(tokens, case["used"], case["K"])
    if case["dropped"]:
        ids = ids.masked_fill(draw.uniform(*ids.shape) < case["dropped"], -1)
    return {
        "x": draw.normal(tokens, hidden),
        "weight": ExpertWeights(
            gate=draw.weights(case["format"], experts, width, hidden),
            up=draw.weights(case["format"], experts, width, hidden),
            down=draw.weights(case["down_format"], experts, hidden, width),
        ),
        "ids": ids,
        "slot_weights": draw.uniform(tokens, case["K"]) + 0.1,
        "shared": draw.normal(tokens, hidden) if case["shared"] else None,
        "residual": draw.normal(tokens, hidden, std=0.3) if case["residual"] else None,
    }


def expected(inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """For each token, for each of its experts, in float64."""
    stored: ExpertWeights = inputs["weight"]
    gate, up, down = (
        w.dequantize(torch.float64).cpu() for w in (stored.gate, stored.up, stored.down)
    )
    x, slot_weights = inputs["x"].cpu().double(), inputs["slot_weights"].cpu().double()
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
            out[token] += slot_weights[token, slot] * (down[expert] @ hidden)
    return (out,)


CHECK = Check(inputs, expected)
