"""How many tiles a launch must provide for."""

from __future__ import annotations

import pytest
import torch

from tetrad.kernels.sort_tokens.contract import max_small_tiles
from tetrad.kernels.sort_tokens.reference import tiles_of


@pytest.mark.parametrize(("block", "small_block"), [(256, 144), (32, 8), (64, 16), (10, 3)])
def test_no_expert_needs_more_small_tiles(block: int, small_block: int):
    """And some number of slots does need as many."""
    counts = torch.arange(20 * block)
    tiles, each = tiles_of(counts, block, small_block)
    small = tiles.where(each <= small_block, 0)
    assert int(small.max()) == max_small_tiles(1, block, small_block)
    assert max_small_tiles(7, block, small_block) == 7 * max_small_tiles(1, block, small_block)
