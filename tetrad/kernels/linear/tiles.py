"""Which tile a step gets, and into how many parts its sums are split."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tetrad.core.errors import UnsupportedError
from tetrad.kernels.experts.packing import TILE_ROWS
from tetrad.kernels.experts.tiles import HOPPER, MIN_STAGES, Capability, shared_bytes_of
from tetrad.kernels.triton_support import cdiv, next_power_of_2

SCRATCH_BYTES = 8 << 10
"""For turning results around while the buffers of the loop are still in use."""
SMALL_COLUMNS = 64
MOST_SPLITS = 16
SUM_STEPS = 0.035
"""What it takes to add one token's 128 numbers of a part, in steps of 128 columns."""


@dataclass(frozen=True, slots=True)
class LinearTile:
    """How one program of `split_product` works."""

    rows: int
    """Token rows of a tile: a power of two from 16."""
    columns: int
    """Columns of weights and tokens per step of the loop: SMALL_COLUMNS or twice that."""
    stages: int
    """Steps in flight between memory and the tensor cores."""
    warps: int = 4
    group: int = 16
    """Token tiles that go through the weights side by side, to meet in the L2 cache."""

    def at_once(self, capability: Capability, bits: int) -> int:
        """Programs for which a multiprocessor has the shared memory."""
        return max(1, shared_bytes_of(capability) // self.shared_bytes(capability, bits))

    def shared_bytes(self, capability: Capability, bits: int) -> int:
        """Shared memory that Triton takes at most; `bits` of a weight in memory, scales apart.

        Before and after Hopper the decoded weights pass through shared memory too.
        """
        tokens, decoded = self.rows * self.columns * 2, TILE_ROWS * self.columns * 2
        block_scales = TILE_ROWS * self.columns // 16 if bits == 4 else 0
        packed = TILE_ROWS * self.columns * bits // 8 + block_scales
        if capability[0] == HOPPER:
            pipeline = self.stages * (packed + tokens) + SCRATCH_BYTES
        else:
            pipeline = (self.stages - 1) * (packed + tokens) + decoded + tokens
        return max(pipeline, TILE_ROWS * self.rows * 4)


Tiles = tuple[tuple[float, LinearTile], ...]
"""Tokens of a step up to which a tile is taken, by rising number; the last has no limit."""

_FEW_TOKENS: Tiles = (
    (16, LinearTile(rows=16, columns=128, stages=4)),
    (64, LinearTile(rows=32, columns=128, stages=4)),
)
NVFP4_HOPPER_TILES: Tiles = (
    *_FEW_TOKENS,
    (512, LinearTile(rows=64, columns=64, stages=4)),
    (math.inf, LinearTile(rows=128, columns=64, stages=3)),
)
FP8_HOPPER_TILES: Tiles = (*_FEW_TOKENS, (math.inf, LinearTile(rows=64, columns=128, stages=4)))
"""Measured on an H200 with matrices of 2048 x 6144, 6144 x 2048 and 12288 x 6144."""
NVFP4_OTHER_TILES: Tiles = (
    (16, LinearTile(rows=16, columns=64, stages=4)),
    (32, LinearTile(rows=32, columns=64, stages=4)),
    (64, LinearTile(rows=64, columns=64, stages=4)),
    (math.inf, LinearTile(rows=128, columns=64, stages=3, warps=8)),
)
"""Compiled for compute capability 8.0, 10.0 and 12.0, run on none of them."""
FP8_OTHER_TILES = NVFP4_OTHER_TILES


def tile_for(num_tokens: int, capability: Capability, bits: int) -> LinearTile:
    """The tile for a step over weights of so many bits."""
    if capability[0] == HOPPER:
        tiles = NVFP4_HOPPER_TILES if bits == 4 else FP8_HOPPER_TILES
    else:
        tiles = NVFP4_OTHER_TILES if bits == 4 else FP8_OTHER_TILES
    return next(tile for limit, tile in tiles if num_tokens <= limit)


def fitted(tile: LinearTile, width: int, capability: Capability, bits: int) -> LinearTile:
    """`tile` with columns that divide the packed `width`, and as many stages as there is room for.

    Raises UnsupportedError when even MIN_STAGES do not fit.
    """
    if width % tile.columns:
        tile = replace(tile, columns=SMALL_COLUMNS)
    limit = shared_bytes_of(capability)
    for stages in range(tile.stages, MIN_STAGES - 1, -1):
        tile = replace(tile, stages=stages)
        if tile.shared_bytes(capability, bits) <= limit:
            return tile
    raise UnsupportedError(
        f"A tile of {tile.rows} tokens by {tile.columns} columns needs "
        f"{tile.shared_bytes(capability, bits)} bytes of shared memory, and a GPU of capability "
        f"{capability[0]}.{capability[1]} has {limit}; a smaller tile fits."
    )


def splits_for(
    tile: LinearTile, num_tokens: int, weight_tiles: int, width: int, cores: int, at_once: int
) -> int:
    """Into how many parts to split each sum over `width` columns: what should take least time.

    In steps of 128 columns: what the busiest multiprocessor does, and what the last program takes
    to add the parts up, both from times on an H200. The number of parts divides the steps, so that
    every program has as many, a constant. Tiles of tokens count as the next power of two, so that
    few programs are compiled. A multiprocessor holds `at_once` programs; more would queue.
    """
    steps = width // tile.columns
    tiles = weight_tiles * next_power_of_2(cdiv(num_tokens, tile.rows))
    most = max(1, min(MOST_SPLITS, cores * at_once // tiles))

    def cost(splits: int) -> float:
        busiest = cdiv(tiles * splits, cores) * (steps // splits) * tile.columns / 128
        return busiest + (SUM_STEPS * splits * min(num_tokens, tile.rows) if splits > 1 else 0)

    return min((splits for splits in range(1, most + 1) if steps % splits == 0), key=cost)
