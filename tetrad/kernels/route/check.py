"""Inputs of routing, with ties, and the answer expert by expert."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tetrad.kernels.backend import Check
from tetrad.kernels.contract import Case
from tetrad.kernels.draw import Draw


def inputs(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Experts 2i and 2i + 1 tie in rows 0 and 1; the bias is of the scores' size."""
    draw = Draw.of(case, dtype, device)
    num_experts = case["E"]
    logits = draw.normal(case["T"], num_experts, dtype=torch.float32)
    logits[:2] = logits[:2, ::2].repeat_interleave(2, dim=1)[:, :num_experts]
    bias = draw.normal(num_experts, dtype=torch.float32, std=0.3)[::2]
    bias = bias.repeat_interleave(2)[:num_experts]
    has_places = case.values.get("into")
    places = torch.zeros(case["T"], case["K"], dtype=torch.int64, device=device)
    return {
        "logits": logits,
        "bias": bias,
        "experts_per_token": case["K"],
        "num_groups": case["groups"],
        "groups_per_token": case["chosen"],
        "normalise": case["normalise"],
        "scaling": 2.5,
        "held": range(*case["held"]),
        "weights_into": places.float() if has_places else None,
        "ids_into": places if has_places else None,
    }


def expected(inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """Per token: rank groups, rank experts, weigh."""
    bias = inputs["bias"].tolist()
    held: range = inputs["held"]
    weights, ids = [], []
    for logits in inputs["logits"].tolist():
        scores = [1.0 / (1.0 + math.exp(-value)) for value in logits]
        choice = [score + extra for score, extra in zip(scores, bias, strict=True)]
        allowed = _allowed(choice, inputs["num_groups"], inputs["groups_per_token"])
        best = sorted(allowed, key=lambda e: (-choice[e], e))[: inputs["experts_per_token"]]
        total = sum(scores[e] for e in best) if inputs["normalise"] else 1.0
        ids.append([e - held.start if e in held else -1 for e in best])
        weights.append([scores[e] / total * inputs["scaling"] for e in best])
    return torch.tensor(weights, dtype=torch.float64), torch.tensor(ids)


def _allowed(choice: list[float], num_groups: int, groups_per_token: int) -> list[int]:
    """The experts of the best groups."""
    if num_groups == 1:
        return list(range(len(choice)))
    size = len(choice) // num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(num_groups)]
    merits = [sum(sorted((choice[e] for e in group), reverse=True)[:2]) for group in groups]
    best = sorted(range(num_groups), key=lambda g: (-merits[g], g))[:groups_per_token]
    return [e for g in best for e in groups[g]]


CHECK = Check(inputs, expected, outputs=tuple)
