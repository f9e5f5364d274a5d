"""What the grouped products issue: whole tiles, however few rows an expert has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tetrad.kernels.experts.packing import GRANULE_COLUMNS, TILE_ROWS
from tetrad.kernels.experts.prepared import GroupedExperts
from tetrad.kernels.experts.tiles import TileShape, tile_for, triton_tiles
from tetrad.kernels.sort_tokens.reference import tiles_of


def issued_flops(ids: Tensor, weight: GroupedExperts, tile: TileShape) -> float:
    """Floating-point operations of both products of a step, padding included.

    An expert's rows are dealt evenly to its tiles, and each tile takes the size that holds them.
    """
    counts = ids[ids >= 0].bincount(minlength=weight.num_experts)
    num_tiles, each = tiles_of(counts, tile.block, tile.small_block)
    num_whole = (num_tiles - 1).clamp(min=0)
    smaller = tile.rest.sizes if tile.rest else tile.sizes
    sizes = torch.tensor([0, *map(sum, smaller), tile.block], device=ids.device)
    # the last tile of an expert is computed in the way of its others
    rest = (counts - each * num_whole).where(each <= tile.small_block, each)
    rest, each = (sizes[torch.searchsorted(sizes, rows)] for rows in (rest, each))
    num_rows = int((each * num_whole + rest).sum())
    per_row = sum(
        2.0 * part.num_columns * TILE_ROWS * part.granules * GRANULE_COLUMNS
        for part in (weight.gate_up, weight.down)
    )
    return num_rows * per_row


def triton_tile(ids: Tensor, weight: GroupedExperts) -> tuple[TileShape, tuple[int, int]]:
    """The tile that the Triton backend takes for a step on the device of `ids`, and what that is
    capable of."""
    capability = torch.cuda.get_device_capability(ids.device)
    tile = tile_for(ids.numel(), weight.num_routed, triton_tiles(capability))
    return tile, capability


def issued_by_triton(arguments: Mapping[str, Any]) -> float | None:
    """Of a call with these arguments; None where plain torch computes it."""
    ids, weight = arguments["ids"], arguments["weight"]
    if not isinstance(weight, GroupedExperts):
        return None
    return issued_flops(ids, weight, triton_tile(ids, weight)[0])
