"""Inputs of sampling, and the answer by walking down a sorted list."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tetrad.kernels.backend import Check
from tetrad.kernels.contract import Case
from tetrad.kernels.draw import Draw


def inputs(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """With `rules`, each row exercises another: greedy, a tie, top-k, top-p, min-p, all, ends."""
    draw = Draw.of(case, dtype, device)
    rows = case["R"]
    columns: dict[str, list[float]] = {
        "temperature": [0.0, 1.0, 0.7, 1.5, 1.0, 0.9, 1.0, 2.0],
        "top_k": [0, 2, 5, 0, 0, 12, 1, 0],
        "top_p": [1.0, 1.0, 1.0, 0.6, 1.0, 0.9, 1.0, 1e-6],
        "min_p": [0.0, 0.0, 0.0, 0.0, 0.3, 0.05, 0.0, 0.0],
    }
    if not case["rules"]:
        columns = {"temperature": [float(rows > 1)], "top_k": [0], "top_p": [1.0], "min_p": [0.0]}
    logits = draw.normal(rows, case["V"], dtype=torch.float32, std=2.0)
    logits[0, 7] = logits[0, 3] = logits[0].max() + 1.0
    logits[-1] = logits[-1].round()
    arguments = {
        name: torch.tensor(values * (rows // len(values) or 1)).to(device)
        for name, values in columns.items()
    }
    return {"logits": logits, **arguments, "uniform": draw.uniform(rows)}


def expected(inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """Row by row."""
    rows = zip(*(value.tolist() for value in inputs.values()), strict=True)
    return (torch.tensor([_choose(*row) for row in rows]),)


def _choose(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> int:
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if temperature == 0:
        return ranked[0]
    best = logits[ranked[0]]
    ranked = ranked[: top_k or None]
    weight = {token: math.exp((logits[token] - best) / temperature) for token in ranked}
    nucleus, share, total = [], 0.0, sum(weight.values())
    for token in ranked:
        if share >= top_p * total:
            break
        nucleus.append(token)
        share += weight[token]
    kept = [token for token in nucleus if weight[token] >= min_p * weight[ranked[0]]]
    left = uniform * sum(weight[token] for token in kept)
    for token in sorted(kept):
        left -= weight[token]
        if left < 0:
            return token
    return max(kept)


CHECK = Check(inputs, expected)
