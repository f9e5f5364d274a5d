"""The router's product by cuBLAS: bf16 times bf16 is exact in fp32, where the sum stays."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.core.hardware import DeviceSnapshot
from tetrad.formats.weights import DenseWeight, Weight
from tetrad.kernels.backend import Backend
from tetrad.kernels.router import reference


def why_not(device: DeviceSnapshot) -> str | None:
    """None, or why cuBLAS cannot run on `device`, and what can."""
    if device.compute_capability is None:
        return "needs an NVIDIA GPU; on a CPU use 'torch'"
    return None


def prepare(weight: Weight, dtype: torch.dtype) -> DenseWeight:
    """bf16 stays as stored for bf16 activations. All else becomes fp32: bf16 may not hold it."""
    if dtype == torch.bfloat16 and isinstance(weight, DenseWeight) and weight.data.dtype == dtype:
        return weight
    return reference.prepare(weight, dtype)


def run(x: Tensor, weight: DenseWeight) -> Tensor:
    """One launch, or two where cuBLAS splits the sum."""
    if weight.data.dtype == torch.float32:
        return reference.run(x, weight)
    return torch.mm(x, weight.data.t(), out_dtype=torch.float32)


BACKEND = Backend("cublas", run, why_not, prepare)
