"""How keys lie in the cache, in bytes."""

from __future__ import annotations

from typing import Literal

KeyFormat = Literal["activation", "fp8_e4m3"]
"""activation: numbers of the activations' type. fp8_e4m3: codes with scales, see
`formats/fp8_keys.py`."""
ACTIVATION: KeyFormat = "activation"
FP8: KeyFormat = "fp8_e4m3"

SCALE_BLOCK = 128
"""Columns of a latent that share a scale."""
SCALE_BYTES = 4
ROTARY_BYTES = 2
"""Of a rotary number beside FP8 codes, which stays bf16: it carries the position."""


def num_scales(rank: int) -> int:
    """Scales of a latent of `rank` numbers."""
    return -(-rank // SCALE_BLOCK)


def latent_bytes(key_format: KeyFormat, rank: int, rotary: int, size: int) -> int:
    """Of one token's latent and rotary key; `size`: bytes of an activation."""
    if key_format == FP8:
        return rank + num_scales(rank) * SCALE_BYTES + rotary * ROTARY_BYTES
    return (rank + rotary) * size


def index_bytes(key_format: KeyFormat, width: int, size: int) -> int:
    """Of one token's index key."""
    return width + SCALE_BYTES if key_format == FP8 else width * size
