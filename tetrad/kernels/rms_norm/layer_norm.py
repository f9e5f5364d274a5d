"""RMS norm of a CPU as the layer norm of [x, -x], whose mean is 0 and whose variance is the mean
square of x: torch has one kernel for that, and ten for the formula."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from tetrad.core.hardware import DeviceSnapshot
from tetrad.kernels.backend import Backend

MOST_WEIGHTS = 1024
"""Of all layers, whose doubles are kept: making one takes a quarter of a norm's time."""


def why_not(device: DeviceSnapshot) -> str | None:
    """Twice the width costs a GPU what launching fewer kernels saves a CPU."""
    return None if device.kind == "cpu" else "saves launches on a CPU; a GPU has better backends"


def run(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In fp32 inside, rounded once."""
    width = len(weight)
    both = torch.cat([x, -x], dim=-1)
    return torch.native_layer_norm(both, (2 * width,), _twice(weight), None, eps)[0][..., :width]


@lru_cache(maxsize=MOST_WEIGHTS)
def _twice(weight: Tensor) -> Tensor:
    return torch.cat([weight, weight])


BACKEND = Backend("layer_norm", run, why_not)
