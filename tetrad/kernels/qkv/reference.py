"""Rotated queries, and keys and values in their slots, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.kernels.backend import Backend


def run(
    joined: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, pool: Tensor
) -> tuple[Tensor, Tensor]:
    """(a, b) becomes (a cos - b sin, b cos + a sin): both halves times cos, plus the other half
    times ±sin."""
    num_pairs = cos.shape[1]
    heads = joined.view(len(joined), -1, 2, num_pairs)
    num_shared = pool.shape[-1] // (4 * num_pairs)
    turned = heads[:, :-num_shared].float()
    signed = torch.stack([-sin, sin], dim=1)
    turned = torch.addcmul(turned * cos[:, None, None], turned.flip(2), signed[:, None])
    turned = turned.to(joined.dtype).flatten(2)
    num_heads = turned.shape[1] - num_shared
    rows = torch.cat([turned[:, num_heads:].flatten(1), heads[:, -num_shared:].flatten(1)], dim=1)
    pool.view(-1, pool.shape[-1]).index_copy_(0, slots, rows)
    return turned[:, :num_heads], pool


BACKEND = Backend("torch", run)
