"""Inputs of the selection, with ties, and the answer by sorting Python tuples."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tetrad.kernels.backend import Check
from tetrad.kernels.contract import Case
from tetrad.kernels.draw import Draw


def inputs(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Row t does not see its last t keys. Tied cases hold few values, both zeros and
    NaNs of both signs among them."""
    draw = Draw.of(case, dtype, device)
    scores = draw.normal(case["T"], case["M"], dtype=torch.float32)
    if case["ties"]:
        scores = (scores * 2).round() / 2
        scores[0, 7], scores[0, 3] = torch.nan, -torch.nan
    for row in range(case["T"]):
        scores[row, case["M"] - row :] = -torch.inf
    return {"scores": scores, "topk": case["topk"]}


def expected(inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """Sort by falling score, then rising position."""
    chosen = []
    for row in inputs["scores"].nan_to_num(nan=torch.inf, neginf=-torch.inf).tolist():
        seen = [position for position, score in enumerate(row) if score > -math.inf]
        best = sorted(seen, key=lambda p: (-row[p], p))[: inputs["topk"]]
        chosen.append(sorted([*best, *[-1] * (inputs["topk"] - len(best))]))
    return (torch.tensor(chosen),)


def outputs(selected: Tensor) -> tuple[Tensor, ...]:
    """The order is the backend's own, so sets are compared."""
    return (selected.sort(dim=-1).values,)


CHECK = Check(inputs, expected, outputs)
