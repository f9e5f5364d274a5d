"""`philox.uniform` for all rows of a step at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tetrad.core.plan import Ints
from tetrad.engine.philox import KEY_STEPS, MULTIPLIERS, NUM_ROUNDS, uniform

FEW = 32
"""Up to so many numbers are had faster one by one."""
HALF = np.uint64(32)
ODD = np.uint64(1)


def uniforms(seeds: npt.NDArray[np.uint64], indices: Ints) -> npt.NDArray[np.float32]:
    """[R]: the `indices[r]`-th number of `seeds[r]`, exactly as `uniform` gives it."""
    if len(seeds) <= FEW:
        pairs = zip(seeds.tolist(), indices.tolist(), strict=True)
        return np.array([uniform(*pair) for pair in pairs], np.float32)
    places = indices.view(np.uint64)
    blocks = places >> np.uint64(2)
    # Words 0 and 1, then 2 and 3, as the halves of a number each: the upper one is multiplied, and
    # the product's halves are the words of the other pair, but for the key and this one's lower.
    words = np.stack([blocks << HALF | blocks >> HALF, np.zeros_like(blocks)])
    keys = np.stack([seeds << HALF, seeds >> HALF << HALF])
    # as long as the others: numpy spreads a column over rows at half the speed
    steps = np.array(KEY_STEPS, np.uint64).repeat(len(seeds)).reshape(keys.shape) << HALF
    multipliers = np.array(MULTIPLIERS, np.uint64).repeat(len(seeds)).reshape(keys.shape)
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
    chosen = np.where(places & np.uint64(2), second, first)
    chosen <<= (places & ODD) * HALF
    chosen >>= np.uint64(40)
    found: npt.NDArray[np.float32] = chosen.astype(np.float32) * np.float32(2.0**-24)
    return found
