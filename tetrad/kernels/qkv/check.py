"""Inputs of `qkv`, and its results pair by pair."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tetrad.core.step import PAGE_TOKENS
from tetrad.kernels.backend import Check
from tetrad.kernels.contract import Case
from tetrad.kernels.draw import Draw
from tetrad.kernels.rope import check as rope


def inputs(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Slots lie anywhere, and what is not written keeps its value."""
    draw = Draw.of(case, dtype, device)
    tokens, width = case["T"], case["W"]
    angles = draw.normal(tokens, width // 2, dtype=torch.float32, std=3.0)
    return {
        "joined": draw.normal(tokens, (case["H"] + 2 * case["G"]) * width),
        "cos": angles.cos().repeat(1, 2),
        "sin": torch.cat([-angles.sin(), angles.sin()], dim=1),
        "slots": draw.permutation(case["P"] * PAGE_TOKENS)[:tokens],
        "pool": draw.normal(case["P"], PAGE_TOKENS, 2 * case["G"] * width),
    }


def expected(inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """Head by head."""
    width = inputs["cos"].shape[1]
    half = {name: inputs[name][:, width // 2 :] for name in ("cos", "sin")}
    pool = inputs["pool"].cpu().double()
    num_shared = pool.shape[-1] // (2 * width)
    heads = inputs["joined"].cpu().unflatten(1, (-1, width))
    (turned,) = rope.expected({**half, "x": heads, "interleaved": False})
    num_heads = heads.shape[1] - 2 * num_shared
    for row, slot in enumerate(inputs["slots"].tolist()):
        written = pool[slot // PAGE_TOKENS, slot % PAGE_TOKENS].view(2, num_shared, width)
        for head in range(num_shared):
            written[0, head] = turned[row, num_heads + head]
            written[1, head] = heads[row, num_heads + num_shared + head].double()
    return turned[:, :num_heads], pool


CHECK = Check(inputs, expected, tuple)
