"""Which tile a step over dense weights gets, and into how many parts its sums are split."""

from __future__ import annotations

from dataclasses import dataclass

from tetrad.kernels.experts.tiles import HOPPER, Capability, shared_bytes_of
from tetrad.kernels.linear.tiles import MOST_SPLITS
from tetrad.kernels.linear.triton_splits import MOST_SPLIT_TILES
from tetrad.kernels.triton_support import cdiv

BLOCK_RESERVE = 1 << 10
"""Shared memory that CUDA keeps of every program's."""
BARRIER_BYTES = 64
"""What tells a program that copies have arrived; at most."""
SMALL_BYTES = 60_000_000
"""A matrix of up to so many counts as small; measured were 53 MB on one side, 67 on the other."""
LEAST_COLUMNS = 2048
"""Of a part of a sum. GLM-5's sums over 2048 columns took 1 to 6.5 us more in two parts, those over
6144 took 0.2 to 2.3 us less in three."""


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
    group: int = 16
    """Token tiles that go through the weights side by side, to meet in the L2 cache."""

    @property
    def shared_bytes(self) -> int:
        """Shared memory that Triton takes at most."""
        ring = self.stages * (self.features + self.rows) * self.columns * 2
        return max(ring, self.features * self.rows * 4) + BARRIER_BYTES

    def at_once(self, capability: Capability) -> int:
        """Programs for which a multiprocessor has the shared memory."""
        whole = shared_bytes_of(capability) + BLOCK_RESERVE
        return max(1, whole // (self.shared_bytes + BLOCK_RESERVE))


@dataclass(frozen=True, slots=True)
class DenseStep:
    """The tiles of steps up to a number of tokens."""

    most_tokens: int
    small: DenseTile
    """For matrices of up to SMALL_BYTES, whose few tiles want one deep ring a multiprocessor."""
    large: DenseTile

    def tile(self, weight_bytes: int) -> DenseTile:
        """For a matrix of so many bytes."""
        return self.small if weight_bytes <= SMALL_BYTES else self.large


HOPPER_STEPS = (
    DenseStep(16, DenseTile(64, 16, 256, stages=5), DenseTile(64, 16, 128, stages=3)),
    DenseStep(32, DenseTile(64, 32, 128, stages=4), DenseTile(64, 32, 128, stages=4)),
    DenseStep(64, DenseTile(64, 64, 128, stages=7), DenseTile(128, 64, 128, stages=4)),
)
"""By rising number of tokens; larger steps go to cuBLAS."""


def tile_for(num_tokens: int, weight_bytes: int, capability: Capability) -> DenseTile | None:
    """The tile for a step, or None where cuBLAS is as fast, or nothing was measured."""
    if capability[0] != HOPPER:
        return None
    steps = (step.tile(weight_bytes) for step in HOPPER_STEPS if num_tokens <= step.most_tokens)
    return next(steps, None)


def splits_for(
    tile: DenseTile, num_tokens: int, features: int, width: int, cores: int, at_once: int
) -> int:
    """Into how many parts to split each sum over `width` columns.

    Bytes bind, and every program in flight gets an equal share of them: what counts is not that
    multiprocessors have equally many programs but that all programs run at once and have equally
    much to do. So as many parts as there is room for, `at_once` programs a multiprocessor, unless
    they become so short that adding them up costs more than it brings.
    """
    tiles = cdiv(features, tile.features) * cdiv(num_tokens, tile.rows)
    if tiles > MOST_SPLIT_TILES:
        return 1
    most = min(MOST_SPLITS, cores * at_once // tiles, width // LEAST_COLUMNS)
    steps = cdiv(width, tile.columns)
    return cdiv(steps, cdiv(steps, max(1, most)))
