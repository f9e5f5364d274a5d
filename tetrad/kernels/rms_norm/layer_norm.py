"""RMS norm of a CPU as the layer norm of [x, -x], whose mean is 0 and whose variance is the mean
square of x: torch has one kernel for that, and ten for the formula."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.core.hardware import DeviceSnapshot
from tetrad.kernels.backend import Backend


def why_not(device: DeviceSnapshot) -> str | None:
    """Twice the width costs a GPU what launching fewer kernels saves a CPU."""
    return None if device.kind == "cpu" else "saves launches on a CPU; a GPU has better backends"


def run(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In fp32 inside, rounded once."""
    width = len(weight)
    both = torch.cat([x, -x], dim=-1)
    normed = torch.native_layer_norm(both, (2 * width,), torch.cat([weight, weight]), None, eps)[0]
    return normed[..., :width]


BACKEND = Backend("layer_norm", run, why_not)
