"""Grouping slots in plain torch: a stable sort, then each expert's first position by sums."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.kernels.backend import Backend
from tetrad.kernels.sort_tokens.contract import FEWEST_FILLED, max_tiles


def tiles_of(counts: Tensor, block: int, small_block: int) -> tuple[Tensor, Tensor]:
    """int64 [E]: slots of each expert → its tiles, and slots of each tile but the last."""
    large = (counts + block - 1) // block
    is_large = counts * FEWEST_FILLED[1] >= large * block * FEWEST_FILLED[0]
    tiles = torch.where(is_large, large, (counts + small_block - 1) // small_block)
    return tiles, (counts + tiles - 1) // tiles.clamp(min=1)


def run(
    ids: Tensor, num_experts: int, block: int, small_block: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Dropped slots sort behind the last expert and land in a spare place past the end."""
    flat = ids.flatten().long()
    most = max_tiles(len(flat), num_experts, small_block)
    flat = flat.where(flat >= 0, num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    tiles, each = tiles_of(counts[:-1], block, small_block)
    turn = each.argsort(descending=True, stable=True)
    last_tile = tiles[turn].cumsum(0)
    first = torch.empty_like(tiles).scatter_(0, turn, (last_tile - tiles[turn]) * block)
    first = torch.cat([first, first.new_full((1,), most * block)])
    each_or_1 = torch.cat([each.clamp(min=1), each.new_ones(1)])

    order = flat.argsort(stable=True)
    expert = flat[order]
    rank = torch.arange(len(flat), device=ids.device) - (counts.cumsum(0) - counts)[expert]
    position = first[expert] + rank // each_or_1[expert] * block + rank % each_or_1[expert]
    rows = torch.full((most * block + 1,), -1, dtype=torch.int32, device=ids.device)
    rows[position.clamp(max=most * block)] = order.int()
    tile = torch.arange(most, device=ids.device)
    place = torch.searchsorted(last_tile, tile, right=True).clamp(max=num_experts - 1)
    tile_expert = turn[place].where(tile < last_tile[-1], -1).int()
    num_large = tiles.where(each > small_block, 0).sum()
    return rows[:-1], tile_expert, torch.stack([num_large, last_tile[-1]]).int()


BACKEND = Backend("torch", run)
