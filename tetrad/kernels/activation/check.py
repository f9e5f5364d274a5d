"""Inputs of the gated activation, and the answer by its formula."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tetrad.kernels.backend import Check
from tetrad.kernels.contract import Case
from tetrad.kernels.draw import Draw


def inputs(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Both are halves of one wider matrix."""
    both = Draw.of(case, dtype, device).normal(case["T"], 2 * case["F"], std=3.0)
    gate, up = both.chunk(2, dim=-1)
    return {"gate": gate, "up": up}


def expected(inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """gate / (1 + exp(-gate)) * up in float64."""
    gate, up = inputs["gate"].cpu().double(), inputs["up"].cpu().double()
    return (gate / (1.0 + (-gate).exp()) * up,)


CHECK = Check(inputs, expected)
