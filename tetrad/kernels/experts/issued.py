"""What the grouped products issue: whole tiles, however few rows an expert has."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.kernels.experts.packing import GRANULE_COLUMNS, TILE_ROWS
from tetrad.kernels.experts.prepared import GroupedExperts
from tetrad.kernels.experts.tiles import TileShape


def issued_flops(ids: Tensor, weight: GroupedExperts, tile: TileShape) -> float:
    """Floating-point operations of both products of a step, padding included.

    An expert's last tile leaves out its second accumulator where its rows fit the first.
    """
    counts = ids[ids >= 0].bincount(minlength=weight.num_experts)
    whole, rest = counts // tile.block, counts % tile.block
    last = torch.where(rest <= tile.rows, tile.rows, tile.block).where(rest > 0, 0)
    num_rows = int((whole * tile.block + last).sum())
    per_row = sum(
        2.0 * part.num_columns * TILE_ROWS * part.granules * GRANULE_COLUMNS
        for part in (weight.gate_up, weight.down)
    )
    return num_rows * per_row
