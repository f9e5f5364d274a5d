"""Inputs of writing keys, and the pool as it should be after."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tetrad.core.step import PAGE_TOKENS
from tetrad.kernels.backend import Check
from tetrad.kernels.contract import Case
from tetrad.kernels.draw import Draw


def inputs(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Slots lie anywhere in the pool; what is not written keeps its value."""
    draw = Draw.of(case, dtype, device)
    num_slots = case["P"] * PAGE_TOKENS
    return {
        "pool": draw.normal(case["P"], PAGE_TOKENS, case["A"] + case["B"]),
        "slots": draw.permutation(num_slots)[: case["T"]],
        "left": draw.normal(case["T"], case["A"]),
        "right": draw.normal(case["T"], case["B"]),
    }


def expected(inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """Token by token, column by column."""
    pool = inputs["pool"].cpu().double().clone()
    left, right = inputs["left"].cpu().double(), inputs["right"].cpu().double()
    for token, slot in enumerate(inputs["slots"].tolist()):
        row = pool[slot // PAGE_TOKENS, slot % PAGE_TOKENS]
        row[: left.shape[1]] = left[token]
        row[left.shape[1] :] = right[token]
    return (pool,)


CHECK = Check(inputs, expected)
