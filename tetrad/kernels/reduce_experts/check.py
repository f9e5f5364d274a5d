"""Inputs of adding up experts, and the answer token by token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tetrad.kernels.backend import Check
from tetrad.kernels.contract import Case
from tetrad.kernels.draw import Draw


def inputs(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Rows of dropped slots are NaN, as memory that nobody wrote may be."""
    draw = Draw.of(case, dtype, device)
    tokens, slots, width = case["T"], case["K"], case["D"]
    is_dropped = draw.uniform(tokens, slots) < case["dropped"]
    rows = draw.normal(tokens * slots, width)
    rows[is_dropped.flatten()] = torch.nan
    ids = torch.arange(tokens * slots, device=device).view(tokens, slots) % 7
    return {
        "rows": rows,
        "ids": ids.masked_fill(is_dropped, -1),
        "slot_weights": draw.uniform(tokens, slots) + 0.1,
        "shared": draw.normal(tokens, width) if case["shared"] else None,
        "residual": draw.normal(tokens, width) if case["residual"] else None,
    }


def expected(inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """For each token, for each slot that is not dropped, in float64."""
    rows, weights = inputs["rows"].cpu().double(), inputs["slot_weights"].cpu().double()
    num_tokens, num_slots = weights.shape
    out = torch.zeros(num_tokens, rows.shape[1], dtype=torch.float64)
    for added in (inputs["shared"], inputs["residual"]):
        if added is not None:
            out += added.cpu().double()
    for token, experts in enumerate(inputs["ids"].tolist()):
        for slot, expert in enumerate(experts):
            if expert >= 0:
                out[token] += weights[token, slot] * rows[token * num_slots + slot]
    return (out,)


CHECK = Check(inputs, expected)
