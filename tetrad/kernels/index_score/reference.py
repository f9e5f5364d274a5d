"""Index scores in plain torch, block by block."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.kernels.backend import Backend
from tetrad.kernels.ragged import Block, Ragged


def run(queries: Tensor, weights: Tensor, pool: Tensor, ragged: Ragged) -> Tensor:
    """fp32 throughout: near-equal scores decide which keys are read."""
    flat = pool.view(-1, pool.shape[-1])
    blocks = ragged.blocks
    if len(blocks) == 1 and blocks[0].is_whole:
        return _scores(blocks[0], queries, weights, flat).squeeze(1)
    out = weights.new_full((len(queries), ragged.max_kv_len), -torch.inf)
    for block in blocks:
        scores = _scores(block, queries, weights, flat)
        block.scatter(scores, out[:, : scores.shape[-1]])
    return out


def _scores(block: Block, queries: Tensor, weights: Tensor, flat: Tensor) -> Tensor:
    """[G, Q, M]."""
    num_groups, num_keys = block.slots.shape
    keys = flat.index_select(0, block.slots.flatten()).view(num_groups, num_keys, -1).float()
    q = block.gather(queries).float()
    per_head = torch.bmm(q.flatten(1, 2), keys.transpose(1, 2)).relu_()
    weight = block.gather(weights).view(-1, 1, weights.shape[1])
    scores = torch.bmm(weight, per_head.view(-1, weights.shape[1], num_keys))
    return scores.view(num_groups, -1, num_keys).masked_fill_(block.hidden, -torch.inf)


BACKEND = Backend("torch", run)
