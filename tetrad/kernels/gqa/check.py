"""Inputs of grouped-query attention, and the answer row by row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tetrad.kernels.backend import Check
from tetrad.kernels.contract import Case
from tetrad.kernels.draw import Draw, rows_of, sequence_slots


def inputs(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Pages are scattered, slots no sequence owns are NaN."""
    draw = Draw.of(case, dtype, device)
    ragged = draw.ragged(case["lens"])
    return {
        "queries": draw.normal(sum(ragged.query_lens), case["H"], case["W"]),
        "pool": draw.pool(case["lens"], ragged, 2 * case["G"] * case["W"]),
        "ragged": ragged,
        "scale": case["W"] ** -0.5,
    }


def expected(inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """A softmax per row and head over the keys it reads."""
    ragged, queries = inputs["ragged"], inputs["queries"].cpu().double()
    _, num_heads, width = queries.shape
    flat = inputs["pool"].cpu().double().flatten(0, 1)
    num_groups = flat.shape[1] // (2 * width)
    out = torch.zeros_like(queries)
    for row, sequence, seen in rows_of(ragged):
        rows = flat[sequence_slots(ragged, sequence)[:seen]]
        for head in range(num_heads if seen > 0 else 0):
            first = head * num_groups // num_heads * width
            keys = rows[:, first : first + width]
            values = rows[:, num_groups * width + first :][:, :width]
            exponentials = (keys @ queries[row, head] * inputs["scale"]).exp()
            out[row, head] = exponentials / exponentials.sum() @ values
    return (out,)


CHECK = Check(inputs, expected)
