"""Sum and RMS norm in plain torch."""

from __future__ import annotations

from torch import Tensor

from tetrad.kernels.backend import Backend
from tetrad.kernels.rms_norm.reference import run as rms_norm


def run(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    more: Tensor | None = None,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One after the other."""
    total = add(x, residual, more)
    normed = rms_norm(total, weight, eps)
    return total, normed if into is None else into.copy_(normed)


def add(x: Tensor, residual: Tensor, more: Tensor | None) -> Tensor:
    """Rounded once."""
    if more is None:
        return x + residual
    return (x.float() + (residual.float() + more.float())).to(x.dtype)


BACKEND = Backend("torch", run)
