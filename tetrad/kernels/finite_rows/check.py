"""Logits with spoiled rows, and the answer number by number."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tetrad.kernels.backend import Check
from tetrad.kernels.contract import Case
from tetrad.kernels.draw import Draw

LARGE = 3e38
"""Finite, though twice of it is not."""


def inputs(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Where rows are spoiled, all but each third are: by one number, somewhere."""
    draw = Draw.of(case, dtype, device)
    logits = draw.normal(case["R"], case["V"], dtype=torch.float32)
    if case["spoiled"]:
        logits[:, 5], logits[:, 6] = LARGE, -LARGE
        for row in range(case["R"]):
            if row % 3:
                column = (row * 2477 + (row % 2) * (case["V"] - 1)) % case["V"]
                logits[row, column] = (math.nan, math.inf, -math.inf)[row % 4 % 3]
    return {"logits": logits}


def expected(inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """In Python."""
    rows = inputs["logits"].double().tolist()
    healthy = [all(map(math.isfinite, row)) for row in rows]
    kept = [row if ok else [0.0] * len(row) for row, ok in zip(rows, healthy, strict=True)]
    return torch.tensor(kept, dtype=torch.float64), torch.tensor(healthy, dtype=torch.int64)


CHECK = Check(inputs, expected, outputs=tuple)
