"""Quantising to NVFP4, as NVIDIA's Model Optimizer does it.

global_scale = amax(matrix) / (6 * 448)               so that the largest block scale is 448
scale        = e4m3(amax(block) / (6 * global_scale)) one per 16 values along `in`
code         = e2m1(value / (scale * global_scale))   nearest, ties to even
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tetrad.formats import e2m1
from tetrad.formats.weights import E4M3_MAX, NVFP4_BLOCK, Nvfp4Weight

E4M3_SMALLEST = 2.0**-9
"""The smallest positive e4m3 number: a block scale never rounds to zero."""


def global_scale_of(matrices: Iterable[Tensor]) -> Tensor:
    """float32 []: the global scale that fits all `matrices` together; 1 when all are zero."""
    amax = torch.stack([matrix.abs().amax().float() for matrix in matrices]).amax()
    scale = (amax / (e2m1.E2M1_MAX * E4M3_MAX)).clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(amax > 0, scale, 1.0)


def quantize(matrix: Tensor, global_scale: Tensor | None = None) -> Nvfp4Weight:
    """Quantise [out, in] to NVFP4; `in` is a multiple of 16.

    `global_scale` (float32 []) is given when several matrices share one; default: from the matrix.
    A block of zeros gets scale 1 and codes 0.
    """
    assert matrix.shape[-1] % NVFP4_BLOCK == 0, tuple(matrix.shape)
    if global_scale is None:
        global_scale = global_scale_of([matrix])
    blocks = matrix.float().reshape(*matrix.shape[:-1], -1, NVFP4_BLOCK)
    ideal = blocks.abs().amax(dim=-1) / (e2m1.E2M1_MAX * global_scale)
    ideal = torch.where(ideal == 0, 1.0, ideal).clamp(E4M3_SMALLEST, E4M3_MAX)
    scales = ideal.to(torch.float8_e4m3fn)
    step = scales.float() * global_scale
    codes = e2m1.encode((blocks / step[..., None]).flatten(-2))
    return Nvfp4Weight(e2m1.pack(codes), scales, global_scale)
