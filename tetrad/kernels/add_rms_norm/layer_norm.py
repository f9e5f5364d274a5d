"""Sum and RMS norm of a CPU, the latter as a layer norm."""

from __future__ import annotations

from torch import Tensor

from tetrad.kernels.add_rms_norm.reference import add
from tetrad.kernels.backend import Backend
from tetrad.kernels.rms_norm.layer_norm import run as rms_norm
from tetrad.kernels.rms_norm.layer_norm import why_not


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


BACKEND = Backend("layer_norm", run, why_not)
