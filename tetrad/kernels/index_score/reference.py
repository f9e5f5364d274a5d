"""Index scores in plain torch, block by block."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.formats import fp8_keys
from tetrad.kernels.backend import Backend
from tetrad.kernels.ragged import Block, Ragged


def run(queries: Tensor, weights: Tensor, pool: Tensor, ragged: Ragged) -> Tensor:
    """fp32 throughout: near-equal scores decide which keys are read."""
    blocks = ragged.blocks
    if len(blocks) == 1 and blocks[0].is_whole:
        return _scores(blocks[0], queries, weights, pool).squeeze(1)
    out = weights.new_full((len(queries), ragged.max_kv_len), -torch.inf)
    for block in blocks:
        scores = _scores(block, queries, weights, pool)
        block.scatter(scores, out[:, : scores.shape[-1]])
    return out


def _scores(block: Block, queries: Tensor, weights: Tensor, pool: Tensor) -> Tensor:
    """[G, Q, M]."""
    num_groups, num_keys = block.slots.shape
    keys = _gather(pool, block.slots)
    q = block.gather(queries).float()
    per_head = torch.bmm(q.flatten(1, 2), keys.transpose(1, 2)).relu_()
    weight = block.gather(weights).view(-1, 1, weights.shape[1])
    scores = torch.bmm(weight, per_head.view(-1, weights.shape[1], num_keys))
    return scores.view(num_groups, -1, num_keys).masked_fill_(block.hidden, -torch.inf)


def _gather(pool: Tensor, slots: Tensor) -> Tensor:
    """fp32 [G, M, I]."""
    if pool.dtype == torch.uint8:
        return fp8_keys.decode_index_keys(pool, slots)
    rows = pool.view(-1, pool.shape[-1]).index_select(0, slots.flatten())
    return rows.view(*slots.shape, -1).float()


BACKEND = Backend("torch", run)
