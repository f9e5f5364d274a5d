"""Rows that are hard to quantise, and what they must become."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.formats import nvfp4
from tetrad.kernels.experts.triton_quantize import RoundedRows

TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0)


def difficult_rows(count: int, width: int) -> Tensor:
    """float32, at least 8: Gaussian, with outliers, zeros, tiny numbers, and codes' midpoints."""
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(count, width, generator=generator)
    x[0] = 0.0
    x[1] *= 1e-6
    x[2, :16] = 0.0
    x[3, 3] = 300.0
    for block, small in enumerate((3e-3, 1e-3, 5e-4, 1e-4), start=1):
        x[3, 16 * block : 16 * block + 16] *= small  # scales that are subnormal, or smaller still
    x[4] *= 1e-38
    ties = torch.tensor(TIES).repeat(width // 8)
    x[5] = ties * torch.where(torch.arange(width) % 3 == 0, -1.0, 1.0) * 448
    x[6, ::2] = -0.0
    return x


def reference_rows(x: Tensor) -> RoundedRows:
    """Each row by `formats.nvfp4`."""
    rows = [nvfp4.quantize(row[None]) for row in x]
    return RoundedRows(
        torch.cat([row.codes for row in rows]),
        torch.cat([row.scales for row in rows]),
        torch.stack([row.global_scale for row in rows]),
    )
