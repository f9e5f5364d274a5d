"""Absorbed queries in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.kernels.backend import Backend
from tetrad.kernels.rope.reference import run as rope


def run(queries: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A product for each head, and the rotation beside it."""
    width = weight.shape[1]
    absorbed = torch.bmm(queries[..., :width].transpose(0, 1), weight).transpose(0, 1)
    return torch.cat([absorbed, rope(queries[..., width:], cos, sin, True)], dim=-1)


BACKEND = Backend("torch", run)
