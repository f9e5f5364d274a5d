"""`philox.uniform` for all rows of a step at once, and seeds for many requests."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tetrad.core.plan import Ints
from tetrad.engine.philox import KEY_STEPS, MULTIPLIERS, NUM_ROUNDS, uniform
from tetrad.engine.sequence import SEED_MASK

FEW = 32
"""Up to so many numbers are had faster one by one."""
SEEDS_AT_ONCE = 256
HALF = np.uint64(32)
ODD = np.uint64(1)

Words = npt.NDArray[np.uint64]


def uniforms(seeds: Words, indices: Ints) -> npt.NDArray[np.float32]:
    """[R]: the `indices[r]`-th number of `seeds[r]`, exactly as `uniform` gives it."""
    if len(seeds) <= FEW:
        pairs = zip(seeds.tolist(), indices.tolist(), strict=True)
        return np.array([uniform(*pair) for pair in pairs], np.float32)
    places = indices.view(np.uint64)
    blocks = places >> np.uint64(2)
    first, second = _philox(blocks << HALF | blocks >> HALF, np.zeros_like(blocks), seeds)
    chosen = np.where(places & np.uint64(2), second, first)
    chosen <<= (places & ODD) * HALF
    chosen >>= np.uint64(40)
    found: npt.NDArray[np.float32] = chosen.astype(np.float32) * np.float32(2.0**-24)
    return found


class DrawnSeeds:
    """A 63-bit seed for the n-th request that brings none, drawn for many at once. The counter's
    last word sets these draws apart from those of `uniform`."""

    def __init__(self, seed: int) -> None:
        self._seed = np.full(SEEDS_AT_ONCE, seed & SEED_MASK, np.uint64)
        self._first = -1
        self._drawn: list[int] = []
        """Those of the requests from `_first` on."""

    def __call__(self, index: int) -> int:
        place = index % SEEDS_AT_ONCE
        if index - place != self._first:
            self._first = index - place
            counters = np.arange(self._first, self._first + SEEDS_AT_ONCE, dtype=np.uint64)
            lower = counters << HALF | counters >> HALF
            first, _ = _philox(lower, np.ones_like(counters), self._seed)
            self._drawn = (first >> np.uint64(1)).tolist()
        return self._drawn[place]


def _philox(lower: Words, upper: Words, keys: Words) -> tuple[Words, Words]:
    """`philox4x32` of counters [n] and keys [n]. Words 0 and 1 of a counter, then 2 and 3, are the
    halves of a number each: the upper one is multiplied, and the product's halves are the words of
    the other pair, but for the key and this one's lower."""
    words = np.stack([lower, upper])
    keys = np.stack([keys << HALF, keys >> HALF << HALF])
    # as long as the others: numpy spreads a column over rows at half the speed
    steps = np.array(KEY_STEPS, np.uint64).repeat(len(lower)).reshape(keys.shape) << HALF
    multipliers = np.array(MULTIPLIERS, np.uint64).repeat(len(lower)).reshape(keys.shape)
    products = np.empty_like(words)
    (first, second), (left, right) = words, products
    for _ in range(NUM_ROUNDS):
        np.right_shift(words, HALF, out=products)
        products *= multipliers
        words <<= HALF
        words ^= keys
        first ^= right
        second ^= left
        keys += steps
    return first, second
