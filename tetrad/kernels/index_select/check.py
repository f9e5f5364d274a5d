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
    """Row t does not see its last t keys: -inf in even rows, NaN that does not count in odd ones.

    Tied cases hold few values, both zeros and NaNs of both signs among them.
    """
    draw = Draw.of(case, dtype, device)
    num_rows, num_keys = case["T"], case["M"]
    scores = draw.normal(num_rows, num_keys, dtype=torch.float32)
    if case["ties"]:
        scores = (scores * 2).round() / 2
        scores[0, 7], scores[0, 3] = torch.nan, -torch.nan
    row = torch.arange(num_rows, device=device)
    seen = (num_keys - row).clamp(min=0)
    is_hidden = torch.arange(num_keys, device=device) >= seen[:, None]
    is_even = row % 2 == 0
    scores.masked_fill_(is_hidden & is_even[:, None], -torch.inf)
    scores.masked_fill_(is_hidden & ~is_even[:, None], torch.nan)
    seen = torch.where(is_even, num_keys, seen)
    return {"scores": scores, "topk": case["topk"], "seen": seen.int()}


def expected(inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """Sort by falling score, then rising position."""
    chosen = []
    scores = inputs["scores"].nan_to_num(nan=torch.inf, neginf=-torch.inf).tolist()
    for row, num_seen in zip(scores, inputs["seen"].tolist(), strict=True):
        seen = [position for position in range(num_seen) if row[position] > -math.inf]
        best = sorted(seen, key=lambda p: (-row[p], p))[: inputs["topk"]]
        chosen.append(sorted([*best, *[-1] * (inputs["topk"] - len(best))]))
    return (torch.tensor(chosen),)


def outputs(selected: Tensor) -> tuple[Tensor, ...]:
    """The order is the backend's own, so sets are compared."""
    return (selected.sort(dim=-1).values,)


CHECK = Check(inputs, expected, outputs)
