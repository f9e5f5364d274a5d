"""Grouped-query attention in plain torch: padded blocks of sequences, softmax in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.kernels.backend import Backend
from tetrad.kernels.ragged import Ragged


def run(queries: Tensor, pool: Tensor, ragged: Ragged, scale: float) -> Tensor:
    """fp32 inside, one rounding at the end."""
    _, num_heads, width = queries.shape
    num_groups = pool.shape[-1] // (2 * width)
    flat = pool.view(-1, 2, num_groups, width)
    out = torch.zeros_like(queries)
    for block in ragged.blocks:
        q = block.gather(queries).float()
        q = q.view(*q.shape[:2], num_groups, num_heads // num_groups, width)
        keys, values = flat[block.slots].float().unbind(2)
        scores = torch.einsum("bqghw,bmgw->bqghm", q, keys) * scale
        scores = scores.masked_fill_(block.hidden[:, :, None, None], -torch.inf)
        attended = torch.einsum("bqghm,bmgw->bqghw", scores.softmax(-1), values)
        block.scatter(attended.flatten(2, 3).to(out.dtype), out)
    return out


BACKEND = Backend("torch", run)
