"""Gated activation in plain torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from tetrad.kernels.backend import Backend


def run(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return functional.silu(gate.float()).mul_(up).to(gate.dtype)


BACKEND = Backend("torch", run)
