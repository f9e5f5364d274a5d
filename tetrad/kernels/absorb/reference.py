"""Absorbed queries in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.kernels.backend import Backend
from tetrad.kernels.head_linear.reference import run as head_linear
from tetrad.kernels.rope.reference import run as rope


def run(queries: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One after the other."""
    width = weight.shape[1]
    absorbed = head_linear(queries[..., :width], weight)
    return torch.cat([absorbed, rope(queries[..., width:], cos, sin, True)], dim=-1)


BACKEND = Backend("torch", run)
