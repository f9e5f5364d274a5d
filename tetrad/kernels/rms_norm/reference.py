"""RMS norm in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tetrad.kernels.backend import Backend


def run(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last axis. The sum of squares is fp32 whatever the type of x."""
    if x.dtype == torch.float32:
        return functional.rms_norm(x, weight.shape, weight, eps)
    return functional.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


BACKEND = Backend("torch", run)
