"""Cached keys in FP8: e4m3 codes with fp32 scales that are powers of two.

A token's latent takes 656 bytes at GLM-5's widths, in this order (FlashMLA's layout):

    512 e4m3 codes | 4 fp32 scales, one for 128 columns each | 64 bf16 rotary numbers

Index keys lie page by page (DeepGEMM's layout): the 64 x 128 codes of a page, then its 64 scales.

A scale is the smallest power of two with which the largest code is at most 448. Codes have four
significant bits and scales one, so a decoded number is exact in bf16: only storing rounds, each
number by at most 1/16 of itself, or by 2^-10 of its scale where that is more.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tetrad.core.keys import SCALE_BLOCK, SCALE_BYTES, num_scales
from tetrad.formats.weights import E4M3_MAX

LEAST_RATIO = 2.0**-100
"""Of the largest number and 448: below it a scale stays what it is, so that zeros have one."""


def scales(amax: Tensor) -> Tensor:
    """fp32: the scales of numbers that are at most `amax`; NaN where that is not finite."""
    ratio = (amax.float() * (1.0 / E4M3_MAX)).clamp(min=LEAST_RATIO)
    rounded = ((ratio.view(torch.int32) + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32)
    return torch.where(ratio.isfinite(), rounded, torch.nan)


def encode_latents(latent: Tensor, rotary: Tensor) -> Tensor:
    """[..., C] and [..., R] to uint8 [..., bytes]."""
    rank = latent.shape[-1]
    groups = num_scales(rank)
    padded = functional.pad(latent.float(), (0, groups * SCALE_BLOCK - rank))
    blocks = padded.view(*padded.shape[:-1], groups, SCALE_BLOCK)
    scale = scales(blocks.abs().amax(-1))
    codes = _codes(blocks, scale.unsqueeze(-1)).flatten(-2)[..., :rank]
    parts = [codes, _as_bytes(scale), _as_bytes(rotary.bfloat16())]
    return torch.cat(parts, dim=-1)


def decode_latents(rows: Tensor, rank: int) -> Tensor:
    """uint8 [..., bytes] to fp32 [..., C + R]."""
    groups = num_scales(rank)
    end = rank + groups * SCALE_BYTES
    scale = _view_as(rows[..., rank:end], torch.float32)
    latent = rows[..., :rank].contiguous().view(torch.float8_e4m3fn).float()
    latent = latent * scale.repeat_interleave(SCALE_BLOCK, dim=-1)[..., :rank]
    return torch.cat([latent, _view_as(rows[..., end:], torch.bfloat16).float()], dim=-1)


def encode_index_keys(keys: Tensor) -> Tensor:
    """Whole pages [P, PAGE_TOKENS, I] to uint8 [P, PAGE_TOKENS, I + 4]."""
    num_pages, page_tokens, width = keys.shape
    scale = scales(keys.float().abs().amax(-1))
    codes = _codes(keys.float(), scale.unsqueeze(-1)).flatten(1)
    both = torch.cat([codes, _as_bytes(scale)], dim=-1)
    return both.view(num_pages, page_tokens, width + SCALE_BYTES)


def store_index_keys(pool: Tensor, slots: Tensor, keys: Tensor) -> None:
    """Write `keys` [T, I] to the slots [T] of a pool [P, PAGE_TOKENS, I + 4]."""
    codes, scale = index_parts(pool)
    page, offset = slots // pool.shape[1], slots % pool.shape[1]
    fresh = scales(keys.float().abs().amax(-1))
    codes[page, offset] = _codes(keys.float(), fresh.unsqueeze(-1))
    scale[page, offset] = fresh


def index_parts(pool: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a pool [P, PAGE_TOKENS, I + 4]: codes uint8 [P, PAGE_TOKENS, I], scales fp32
    [P, PAGE_TOKENS]."""
    _, page_tokens, row_bytes = pool.shape
    width = row_bytes - SCALE_BYTES
    pages = pool.flatten(1)
    codes = pages[:, : page_tokens * width].view(-1, page_tokens, width)
    return codes, pages[:, page_tokens * width :].view(torch.float32)


def decode_index_keys(pool: Tensor, slots: Tensor) -> Tensor:
    """fp32 [..., I] of the tokens in `slots` [...]."""
    codes, scale = index_parts(pool)
    page, offset = slots // pool.shape[1], slots % pool.shape[1]
    values = codes[page, offset].view(torch.float8_e4m3fn).float()
    return values * scale[page, offset].unsqueeze(-1)


def _codes(values: Tensor, scale: Tensor) -> Tensor:
    return (values / scale).to(torch.float8_e4m3fn).view(torch.uint8)


def _as_bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def _view_as(part: Tensor, dtype: torch.dtype) -> Tensor:
    return part.contiguous().view(dtype)
