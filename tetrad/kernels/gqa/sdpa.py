"""Grouped-query attention by torch's scaled_dot_product_attention, which never writes the scores.

Keys and values are gathered from their pages first. The query heads of one group stand side by side
as rows of one head, so that nobody repeats keys for them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tetrad.kernels.backend import Backend
from tetrad.kernels.ragged import Block, Ragged


def run(queries: Tensor, pool: Tensor, ragged: Ragged, scale: float) -> Tensor:
    """Rounds as the activations are rounded."""
    blocks = ragged.blocks
    if len(blocks) == 1 and blocks[0].is_whole:
        return _attend(queries.unsqueeze(1), pool, blocks[0], scale).squeeze(1)
    out = torch.zeros_like(queries)
    for block in blocks:
        block.scatter(_attend(block.gather(queries), pool, block, scale), out)
    return out


def _attend(queries: Tensor, pool: Tensor, block: Block, scale: float) -> Tensor:
    """[B, Q, H, W] over the block's keys, to the same."""
    num_runs, num_rows, num_heads, width = queries.shape
    flat = pool.view(-1, pool.shape[-1])
    num_groups = flat.shape[1] // (2 * width)
    rows = flat.index_select(0, block.slots.flatten())
    keys, values = rows.view(num_runs, -1, 2, num_groups, width).permute(2, 0, 3, 1, 4).unbind()
    shared = num_heads // num_groups
    if num_rows == 1:
        # the usual case, in which the calls below, though they move nothing, take a tenth of a step
        one_row = queries.view(num_runs, num_groups, shared, width)
        return functional.scaled_dot_product_attention(
            one_row, keys, values, block.mask(shared), scale=scale
        ).reshape(queries.shape)
    side_by_side = queries.view(num_runs, num_rows, num_groups, shared, width)
    side_by_side = side_by_side.permute(0, 2, 3, 1, 4).flatten(2, 3)
    attended = functional.scaled_dot_product_attention(
        side_by_side, keys, values, block.mask(shared), scale=scale
    )
    apart = attended.view(num_runs, num_groups, shared, num_rows, width)
    return apart.permute(0, 3, 1, 2, 4).flatten(2, 3)


BACKEND = Backend("sdpa", run)
