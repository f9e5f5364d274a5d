"""Which tile a step over dense weights gets, and into how many parts its sums are split."""

from __future__ import annotations

from dataclasses import dataclass

from tetrad.kernels.experts.tiles import HOPPER, Capability, shared_bytes_of
from tetrad.kernels.linear.tiles import MOST_SPLITS
from tetrad.kernels.linear.triton_splits import MOST_SPLIT_TILES
from tetrad.kernels.triton_support import cdiv

BLOCK_RESERVE = 1 << 10
"""Shared memory that CUDA keeps of every program's."""
MOST_PARTS_BYTES = 0.5
"""Written and read parts of a split sum may come to that share of the weights' bytes."""


@dataclass(frozen=True, slots=True)
class DenseTile:
    """How one program of `dense_product` works."""

    features: int
    """Rows of weights of a tile: 64 or a multiple."""
    rows: int
    """Token rows of a tile: a power of two from 16."""
    columns: int
    """Columns of weights and tokens per step of the loop."""
    stages: int
    """Steps in flight between memory and the tensor cores."""
    warps: int = 4
    group: int = 16
    """Token tiles that go through the weights side by side, to meet in the L2 cache."""
    is_bulk: bool = True
    """Whole tiles are copied by the copy engine (TMA); else every thread copies 16 bytes at a time,
    which any size and GPU can have."""

    ahead: int = 0
    """Columns of its weights that a program asks into the L2 cache while the kernel before it may
    still run; 0: it starts when that has ended."""

    @property
    def shared_bytes(self) -> int:
        """Shared memory that Triton takes at most."""
        ring = self.stages * (self.features + self.rows) * self.columns * 2
        return max(ring, self.features * self.rows * 4) + (64 if self.is_bulk else 0)

    def at_once(self, capability: Capability) -> int:
        """Programs for which a multiprocessor has the shared memory."""
        whole = shared_bytes_of(capability) + BLOCK_RESERVE
        return max(1, whole // (self.shared_bytes + BLOCK_RESERVE))


Tiles = tuple[tuple[int, DenseTile], ...]
"""Tokens of a step up to which a tile is taken, by rising number; larger steps go to cuBLAS."""

HOPPER_TILES: Tiles = (
    (16, DenseTile(features=64, rows=16, columns=128, stages=5)),
    (32, DenseTile(features=64, rows=32, columns=128, stages=4)),
    (64, DenseTile(features=128, rows=64, columns=64, stages=4)),
)


def tile_for(num_tokens: int, capability: Capability) -> DenseTile | None:
    """The tile for a step, or None where cuBLAS is as fast, or nothing was measured."""
    if capability[0] != HOPPER:
        return None
    return next((tile for limit, tile in HOPPER_TILES if num_tokens <= limit), None)


def splits_for(
    tile: DenseTile, num_tokens: int, features: int, width: int, cores: int, at_once: int
) -> int:
    """Into how many parts to split each sum over `width` columns.

    Bytes bind, and every program in flight gets an equal share of them: what counts is not that
    multiprocessors have equally many programs but that all programs run at once and have equally
    much to do. So as many parts as there is room for, `at_once` programs a multiprocessor, unless
    the parts themselves would be bytes worth speaking of.
    """
    tiles = cdiv(features, tile.features) * cdiv(num_tokens, tile.rows)
    if tiles > MOST_SPLIT_TILES:
        return 1
    most = min(
        MOST_SPLITS, cores * at_once // tiles, int(MOST_PARTS_BYTES * width / 4 / num_tokens)
    )
    steps = cdiv(width, tile.columns)
    return cdiv(steps, cdiv(steps, max(1, most)))
