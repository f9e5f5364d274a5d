"""What the grouped products issue: whole tiles, however few rows an expert has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tetrad.kernels.experts.packing import GRANULE_COLUMNS, TILE_ROWS
from tetrad.kernels.experts.prepared import GroupedExperts
from tetrad.kernels.experts.tiles import TileShape, tile_for, triton_tiles


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


def triton_tile(ids: Tensor, weight: GroupedExperts) -> tuple[TileShape, tuple[int, int]]:
    """The tile that the Triton backend takes for a step on the device of `ids`, and what that is
    capable of."""
    capability = torch.cuda.get_device_capability(ids.device)
    tile = tile_for(ids.numel(), weight.num_experts, triton_tiles(capability))
    return tile, capability


def issued_by_triton(arguments: Mapping[str, Any]) -> float | None:
    """Of a call with these arguments; None where plain torch computes it."""
    ids, weight = arguments["ids"], arguments["weight"]
    if not isinstance(weight, GroupedExperts):
        return None
    return issued_flops(ids, weight, triton_tile(ids, weight)[0])
