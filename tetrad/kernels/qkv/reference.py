"""Rotated queries, and keys and values in their slots, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.kernels.backend import Backend


def run(
    joined: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, pool: Tensor
) -> tuple[Tensor, Tensor]:
    """Each half times cos, plus the other half times sin with its sign."""
    width = cos.shape[1]
    heads = joined.view(len(joined), -1, width)
    num_shared = pool.shape[-1] // (2 * width)
    straight = heads[:, :-num_shared].float()
    half = width // 2
    swapped = torch.cat([straight[..., half:], straight[..., :half]], dim=-1)
    turned = (straight * cos.unsqueeze(1)).addcmul_(swapped, sin.unsqueeze(1)).to(joined.dtype)
    num_heads = turned.shape[1] - num_shared
    rows = torch.cat([turned[:, num_heads:], heads[:, -num_shared:]], dim=1).flatten(1)
    pool.view(-1, pool.shape[-1]).index_copy_(0, slots, rows)
    return turned[:, :num_heads], pool


BACKEND = Backend("torch", run)
