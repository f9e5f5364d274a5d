"""`philox.uniform` for all rows of a step at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tetrad.engine.philox import KEY_STEPS, MASK, MULTIPLIERS, NUM_ROUNDS, uniform

FEW = 32
"""Up to so many numbers are had faster one by one."""


def uniforms(seeds: Sequence[int], indices: Sequence[int]) -> Tensor:
    """float32 [R]: the `indices[r]`-th number of `seeds[r]`, exactly as `uniform` gives it."""
    if len(seeds) <= FEW:
        return torch.tensor([uniform(*pair) for pair in zip(seeds, indices, strict=True)])
    k0, k1, c0, c1 = torch.tensor(
        [
            [seed & MASK for seed in seeds],
            [seed >> 32 & MASK for seed in seeds],
            [index >> 2 & MASK for index in indices],
            [index >> 34 & MASK for index in indices],
        ]
    )
    c2 = c3 = torch.zeros_like(c0)
    for _ in range(NUM_ROUNDS):
        # int64 wraps, and the bits of a product of two 32-bit words are all there.
        left, right = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (right >> 32 & MASK) ^ c1 ^ k0,
            right & MASK,
            (left >> 32 & MASK) ^ c3 ^ k1,
            left & MASK,
        )
        k0, k1 = k0 + KEY_STEPS[0] & MASK, k1 + KEY_STEPS[1] & MASK
    words = torch.stack([c0, c1, c2, c3])
    turn = torch.tensor([[index & 3 for index in indices]])
    return (words.gather(0, turn).squeeze(0) >> 8).float() * 2.0**-24
