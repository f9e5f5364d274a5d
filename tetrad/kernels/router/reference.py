"""The router's product in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tetrad.formats.weights import DenseWeight, Weight
from tetrad.kernels.backend import Backend


def prepare(weight: Weight, _dtype: torch.dtype) -> DenseWeight:
    """In fp32: there is nothing to save on a device that has no better backend."""
    return DenseWeight(weight.dequantize(torch.float32))


def run(x: Tensor, weight: DenseWeight) -> Tensor:
    """In fp32 throughout."""
    return functional.linear(x.float(), weight.data)


BACKEND = Backend("torch", run, prepare=prepare)
