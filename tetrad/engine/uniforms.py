"""`philox.uniform` for all rows of a step at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tetrad.core.plan import Ints
from tetrad.engine.philox import KEY_STEPS, MASK, MULTIPLIERS, NUM_ROUNDS, uniform

FEW = 32
"""Up to so many numbers are had faster one by one."""
LOW, HIGH = np.uint64(MASK), np.uint64(32)


def uniforms(seeds: npt.NDArray[np.uint64], indices: Ints) -> npt.NDArray[np.float32]:
    """[R]: the `indices[r]`-th number of `seeds[r]`, exactly as `uniform` gives it."""
    if len(seeds) <= FEW:
        pairs = zip(seeds.tolist(), indices.tolist(), strict=True)
        return np.array([uniform(*pair) for pair in pairs], np.float32)
    blocks = (indices >> 2).astype(np.uint64)
    # rows: the two words that are multiplied, the two that are not; products fit into 64 bits
    factors = np.stack([blocks & LOW, np.zeros_like(blocks)])
    others = np.stack([blocks >> HIGH, np.zeros_like(blocks)])
    keys = np.stack([seeds & LOW, seeds >> HIGH])
    steps = np.array(KEY_STEPS, np.uint64)[:, None]
    multipliers = np.array(MULTIPLIERS, np.uint64)[:, None]
    for _ in range(NUM_ROUNDS):
        products = factors * multipliers
        factors = (products >> HIGH)[::-1] ^ others ^ keys
        others = (products & LOW)[::-1]
        keys = keys + steps & LOW
    words = np.stack([factors[0], others[0], factors[1], others[1]])
    chosen = words[indices & 3, np.arange(len(indices))] >> np.uint64(8)
    found: npt.NDArray[np.float32] = chosen.astype(np.float32) * np.float32(2.0**-24)
    return found
