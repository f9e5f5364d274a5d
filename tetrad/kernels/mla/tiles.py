"""Which tile a step gets, what fits the device, and into how many parts a row's keys are split."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tetrad.core.errors import UnsupportedError
from tetrad.kernels.experts.tiles import HOPPER, Capability, shared_bytes_of
from tetrad.kernels.triton_support import cdiv, next_power_of_2

SCRATCH_BYTES = 4 << 10
"""For what warps tell each other, and for indices under way."""
SMALLEST_EDGE = 16
"""Of a product, so of heads and of keys."""
MOST_SPLITS = 32
START_TILES = 1.5
"""What a program does before and after its loop, in tiles of keys."""
COMBINE_TILES = 1.4
"""What the second kernel takes at least, in tiles of keys."""
PART_TILES = 0.016
"""What writing and reading one part takes."""


@dataclass(frozen=True, slots=True)
class MlaTile:
    """How one program of `attend_kernel` works."""

    heads: int
    """Rows of its products: a power of two from 16."""
    keys: int
    """Keys of a step of the loop: a power of two from 16, at most a page."""
    stages: int
    """Steps in flight between memory and the tensor cores."""
    warps: int = 8
    per_core: int = 1
    """Programs that a multiprocessor holds at once."""

    def shared_bytes(self, width: int) -> int:
        """Shared memory that Triton takes at most for keys of `width` 16-bit numbers, padded. FP8
        keys take less: one tile is decoded while the codes of the next arrive.

        wgmma reads a tile of keys while the next arrives; mma.sync has it in registers by then.
        """
        buffers = self.stages if self.heads >= WGMMA_HEADS else max(1, self.stages - 2)
        return (self.heads + buffers * self.keys) * width * 2 + SCRATCH_BYTES


WGMMA_HEADS = 64
WIDE = MlaTile(heads=64, keys=64, stages=2)
"""Hopper's: queries and two tiles of keys, 576 wide, fill its shared memory."""
MIDDLE = MlaTile(heads=32, keys=32, stages=2)
NARROW = MlaTile(heads=16, keys=32, stages=3)
HOPPER_NARROW = MlaTile(heads=16, keys=64, stages=2, per_core=2)
"""As many bytes under way as WIDE has. FP8 keys leave registers for one program only."""


def tile_for(num_heads: int, capability: Capability, is_fp8: bool = False) -> MlaTile:
    """The tile for so many heads and keys of the activations' type, or FP8."""
    is_hopper = capability[0] == HOPPER
    if num_heads <= NARROW.heads:
        if not is_hopper:
            return NARROW
        return replace(HOPPER_NARROW, per_core=1) if is_fp8 else HOPPER_NARROW
    return WIDE if is_hopper and num_heads > MIDDLE.heads else MIDDLE


def fitted(tile: MlaTile, width: int, capability: Capability) -> MlaTile:
    """`tile` with as many keys, then heads, as there is room for; `width`: of a key, padded.

    Raises UnsupportedError when even SMALLEST_EDGE of both do not fit.
    """
    limit = shared_bytes_of(capability)
    while tile.shared_bytes(width) > limit and tile.keys > SMALLEST_EDGE:
        tile = replace(tile, keys=tile.keys // 2)
    while tile.shared_bytes(width) > limit and tile.heads > SMALLEST_EDGE:
        tile = replace(tile, heads=tile.heads // 2)
    if (needed := tile.shared_bytes(width)) <= limit:
        return tile
    raise UnsupportedError(
        f"Attention over keys of {width} numbers, {tile.heads} heads and {tile.keys} keys at a "
        f"time, needs {needed} bytes of shared memory, and a GPU of capability "
        f"{capability[0]}.{capability[1]} has {limit}; --attention-backend torch needs none."
    )


def splits_for(tile: MlaTile, num_rows: int, num_heads: int, most_keys: int, cores: int) -> int:
    """Into how many parts to split the keys of each row: what should take least time.

    From what the host knows before any length: rows, heads, and the most keys a row can read. Rows
    count as the next power of two or three quarters of it, so that few programs are compiled.
    """
    programs = _rounded(num_rows) * cdiv(num_heads, tile.heads)
    tiles = max(1, cdiv(most_keys, tile.keys))

    def cost(splits: int) -> float:
        alone = cdiv(programs * splits, cores * tile.per_core) * (cdiv(tiles, splits) + START_TILES)
        return alone + (COMBINE_TILES + PART_TILES * programs * splits if splits > 1 else 0.0)

    return min(range(1, min(MOST_SPLITS, tiles) + 1), key=cost)


def _rounded(num: int) -> int:
    power = next_power_of_2(num)
    return power * 3 // 4 if num <= power * 3 // 4 else power
