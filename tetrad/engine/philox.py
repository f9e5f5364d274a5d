"""Random numbers by position: the n-th number of a seed, whoever asks and whenever.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011)
turns a 64-bit key and a 128-bit counter into four 32-bit words. The key is the request's seed and
the counter the number of tokens it has generated, so a draw depends on nothing else: not on the
batch, chunking or preemption.
"""

from __future__ import annotations

from functools import lru_cache

NUM_ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF

Words = tuple[int, int, int, int]


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Four words from a counter and a key, all of 32 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        left, right = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right & MASK, (left >> 32) ^ c3 ^ k1, left & MASK
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
    return c0, c1, c2, c3


@lru_cache(maxsize=4096)
def _words(seed: int, block: int) -> Words:
    counter = (block & MASK, (block >> 32) & MASK, 0, 0)
    return philox4x32(counter, (seed & MASK, (seed >> 32) & MASK))


def uniform(seed: int, index: int) -> float:
    """The `index`-th number of `seed`: a multiple of 2**-24 in [0, 1), exact in float32.

    One counter serves four successive numbers.
    """
    return (_words(seed, index >> 2)[index & 3] >> 8) * 2.0**-24
