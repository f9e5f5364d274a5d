"""FP8 keys for the checks of ops: read and rounded another way than backends do it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tetrad.core.keys import SCALE_BLOCK, SCALE_BYTES, num_scales
from tetrad.core.step import PAGE_TOKENS

_MAGNITUDES = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
"""Of the codes 0 to 126, rising."""


def latents_of(pool: Tensor, rank: int) -> Tensor:
    """Float64 [P, PAGE_TOKENS, C + R], FP8 decoded column by column."""
    if pool.dtype != torch.uint8:
        return pool.double()
    columns = []
    for column in range(rank):
        at = rank + column // SCALE_BLOCK * SCALE_BYTES
        scale = pool[..., at : at + SCALE_BYTES].contiguous().view(torch.float32)
        code = pool[..., column : column + 1].contiguous().view(torch.float8_e4m3fn)
        columns.append(code.double() * scale.double())
    rotary = pool[..., rank + num_scales(rank) * SCALE_BYTES :].contiguous().view(torch.bfloat16)
    return torch.cat([*columns, rotary.double()], dim=-1)


def index_keys_of(pool: Tensor, width: int) -> Tensor:
    """Float64 [P, PAGE_TOKENS, I], FP8 decoded page by page."""
    if pool.dtype != torch.uint8:
        return pool.double()
    pages = []
    for page in pool.flatten(1):
        codes, scales = page.split([PAGE_TOKENS * width, SCALE_BYTES * PAGE_TOKENS])
        values = codes.view(torch.float8_e4m3fn).double().view(PAGE_TOKENS, width)
        pages.append(values * scales.clone().view(torch.float32).double()[:, None])
    return torch.stack(pages)


def rounded(values: Tensor, block: int) -> Tensor:
    """Float64 [T, W] as FP8 keeps them, `block` columns with a scale: of the numbers that it has,
    the nearest, and of two that are as near the one with the even code."""
    parts = []
    for part in torch.split(values, block, dim=-1):
        largest = part.abs().amax(-1, keepdim=True)
        exponents = [math.ceil(math.log2(size / 448)) if size else 0 for size in largest.flatten()]
        scale = torch.tensor([2.0**e for e in exponents], dtype=torch.float64).view_as(largest)
        size = part.abs() / scale
        above = torch.searchsorted(_MAGNITUDES, size.contiguous()).clamp(max=126)
        below = (above - 1).clamp(min=0)
        up, down = _MAGNITUDES[above] - size, size - _MAGNITUDES[below]
        code = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
        parts.append(_MAGNITUDES[code] * scale * part.sign())
    return torch.cat(parts, dim=-1)
