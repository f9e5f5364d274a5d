"""Counting padded work by hand."""

from __future__ import annotations

import pytest
import torch

from tetrad.kernels.experts.issued import issued_flops
from tetrad.kernels.experts.packing import GRANULE_COLUMNS, TILE_ROWS
from tetrad.kernels.experts.prepared import GroupedExperts, Operand
from tetrad.kernels.experts.tiles import TileShape

NOTHING = torch.empty(0)
GATE_UP = Operand(NOTHING, NOTHING, NOTHING, True, 200, GRANULE_COLUMNS + 1, TILE_ROWS // 2)
DOWN = Operand(NOTHING, NOTHING, NOTHING, True, TILE_ROWS, 3 * GRANULE_COLUMNS, TILE_ROWS)
EXPERTS = GroupedExperts(GATE_UP, DOWN, 4, 4)
PER_ROW = 2 * TILE_ROWS * GRANULE_COLUMNS * (4 * 2 + 1 * 3)
"""200 features in four tiles of 64; one granule and one column are two granules."""

SMALL = TileShape(64, 64, 3, more_rows=16, smaller=((64, 0),))


@pytest.mark.parametrize(
    ("counts", "tile", "num_rows"),
    [
        ((1, 16, 17, 0), TileShape(16, 64, 3), 16 + 16 + 32),
        ((1, 32, 33, 49), TileShape(32, 64, 3, more_rows=16, smaller=((32, 0),)), 176),
        ((97, 0, 0, 0), TileShape(32, 64, 3, more_rows=16, smaller=((32, 0),)), 48 + 48 + 32),
        ((256, 100, 210, 300), TileShape(256, 64, 3, rest=SMALL), 256 + 128 + 256 + 4 * 80),
        ((0, 0, 0, 0), TileShape(16, 64, 3), 0),
    ],
    ids=["plain", "two sizes", "a smaller last one", "large and small", "nothing"],
)
def test_rows_are_counted_in_tiles(counts: tuple[int, ...], tile: TileShape, num_rows: int):
    ids = torch.repeat_interleave(torch.tensor(counts)).unsqueeze(1)
    dropped = torch.full((3, 1), -1)
    assert issued_flops(torch.cat([dropped, ids]), EXPERTS, tile) == num_rows * PER_ROW
