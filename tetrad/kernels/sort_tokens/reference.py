"""Grouping slots in plain torch: a stable sort, then each expert's first position by sums."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.kernels.backend import Backend
from tetrad.kernels.sort_tokens.contract import max_tiles


def run(ids: Tensor, num_experts: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Dropped slots sort behind the last expert and land in a spare place past the end."""
    flat = ids.flatten().long()
    most = max_tiles(len(flat), num_experts, block)
    flat = flat.where(flat >= 0, num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    tiles = (counts[:-1] + block - 1) // block
    each = (counts[:-1] + tiles - 1) // tiles.clamp(min=1)
    last_tile = tiles.cumsum(0)
    order = flat.argsort(stable=True)
    expert = flat[order]
    rank = torch.arange(len(flat), device=ids.device) - (counts.cumsum(0) - counts)[expert]
    first = torch.cat([(last_tile - tiles) * block, last_tile.new_full((1,), most * block)])
    each = torch.cat([each.clamp(min=1), each.new_ones(1)])[expert]
    position = first[expert] + rank // each * block + rank % each
    position = position.clamp(max=most * block)
    rows = torch.full((most * block + 1,), -1, dtype=torch.int32, device=ids.device)
    rows[position] = order.int()
    tile = torch.arange(most, device=ids.device)
    tile_expert = torch.searchsorted(last_tile, tile, right=True).int()
    tile_expert[tile >= last_tile[-1]] = -1
    return rows[:-1], tile_expert, last_tile[-1:].int()


BACKEND = Backend("torch", run)
