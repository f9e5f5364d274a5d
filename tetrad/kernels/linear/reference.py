"""Linear layer in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tetrad.formats.weights import DenseWeight, Weight
from tetrad.kernels.backend import Backend


def prepare(weight: Weight, dtype: torch.dtype) -> Weight:
    """Dense weights take the activations' type. Quantised ones stay as stored, except on a CPU,
    which has no small formats: there they are decoded once (docs/decisions/002)."""
    if isinstance(weight, DenseWeight) or weight.device.type == "cpu":
        return DenseWeight(weight.dequantize(dtype))
    return weight


def run(x: Tensor, weight: Weight) -> Tensor:
    """A quantised weight is decoded to fp32 and multiplied there, so that only y is rounded."""
    if isinstance(weight, DenseWeight):
        return functional.linear(x, weight.data)
    return functional.linear(x.float(), weight.dequantize(torch.float32)).to(x.dtype)


BACKEND = Backend("torch", run, prepare=prepare)
