"""The router's product by the kernel for dense weights; its sums are fp32 and so is the result."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.formats.weights import DenseWeight, Weight
from tetrad.kernels.backend import Backend
from tetrad.kernels.linear import triton_dense
from tetrad.kernels.linear.triton_dense import DenseLinear
from tetrad.kernels.router import cublas, reference
from tetrad.kernels.triton_support import why_not


def prepare(weight: Weight, dtype: torch.dtype) -> DenseLinear | DenseWeight:
    """bf16 stays as stored for bf16 activations. All else becomes fp32, for plain torch."""
    stored = cublas.prepare(weight, dtype)
    return DenseLinear.of(stored.data) if stored.data.dtype == torch.bfloat16 else stored


def run(x: Tensor, weight: DenseLinear | DenseWeight) -> Tensor:
    """One launch; large steps go to cuBLAS."""
    if isinstance(weight, DenseLinear):
        return triton_dense.run(x, weight, torch.float32)
    return reference.run(x, weight)


BACKEND = Backend("triton", run, why_not, prepare)
