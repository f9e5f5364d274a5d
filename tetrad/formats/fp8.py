"""Quantising to FP8 (e4m3): one scale per matrix, or one per 128 x 128 block."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tetrad.formats.weights import E4M3_MAX, FP8_BLOCK, Fp8BlockWeight, Fp8TensorWeight, block_grid


def quantize_tensor(matrix: Tensor) -> Fp8TensorWeight:
    """Quantise [out, in] with scale = amax / 448 (1 when the matrix is zero)."""
    scale = _scale(matrix.abs().amax().float())
    return Fp8TensorWeight((matrix.float() / scale).to(torch.float8_e4m3fn), scale)


def quantize_block(matrix: Tensor) -> Fp8BlockWeight:
    """Quantise [out, in] with one scale per 128 x 128 block; the sizes may be ragged."""
    out, width = matrix.shape
    padded = functional.pad(matrix.float(), (0, -width % FP8_BLOCK, 0, -out % FP8_BLOCK))
    rows, columns = block_grid(out, width)
    blocks = padded.view(rows, FP8_BLOCK, columns, FP8_BLOCK)
    scale_inv = _scale(blocks.abs().amax(dim=(1, 3)))
    data = (blocks / scale_inv[:, None, :, None]).view_as(padded)
    return Fp8BlockWeight(data[:out, :width].to(torch.float8_e4m3fn).contiguous(), scale_inv)


def _scale(amax: Tensor) -> Tensor:
    scale = (amax / E4M3_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(amax > 0, scale, 1.0)
