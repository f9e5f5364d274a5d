"""Writing keys in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.kernels.backend import Backend


def run(pool: Tensor, slots: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Scatter whole rows."""
    pool.view(-1, pool.shape[-1]).index_copy_(0, slots, torch.cat([left, right], dim=-1))
    return pool


BACKEND = Backend("torch", run)
