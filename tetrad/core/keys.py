"""How keys lie in the cache, in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tetrad.core.errors import ConfigError, nearest

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
LEAST_EXPANDED = 1024
"""Tokens of a whole prompt from which on attention expands its keys and values. Fewer operations
it takes from the first on; below this, writing and reading them takes longer than what it saves."""


def num_expanded(query_lens: Sequence[int], kv_lens: Sequence[int], longest: int) -> int:
    """Sequences at the end of a step whose keys and values attention expands: prompts of which
    nothing was cached before, neither short nor longer than the `longest` that attention reads.

    For a pair of a query and a key, a head of GLM-5 takes 2 (2 C + R) = 2176 operations with
    latents and 2 (N + R + O) = 1024 with keys and values. Expanding these for a token takes
    2 C (N + O), just what it takes to absorb both matrices into its query and its result. So whole
    prompts gain; what reads keys of earlier steps would expand them again, and does not.
    """
    found = 0
    for query_len, kv_len in zip(reversed(query_lens), reversed(kv_lens), strict=True):
        if not LEAST_EXPANDED <= query_len == kv_len <= longest:
            break
        found += 1
    return found


CACHE_DTYPES = ("auto", "bfloat16", "fp8_e4m3")
CACHE_ALIASES = {"bf16": "bfloat16", "fp8": "fp8_e4m3"}
"""What --kv-cache-dtype takes, and what SGLang and vLLM call the same."""


def checked_cache_dtype(name: str) -> str:
    """A value of --kv-cache-dtype. Raises ValueError."""
    if name == "fp8_e5m2":
        raise ValueError(
            "it rounds a key by up to 1/8 of itself, twice as much as fp8_e4m3 in the same bytes; "
            "fp8_e4m3 works"
        )
    name = CACHE_ALIASES.get(name, name)
    if name not in CACHE_DTYPES:
        listed = ", ".join(CACHE_DTYPES)
        raise ValueError(f"expected one of {listed}.{nearest(name, CACHE_DTYPES)}")
    return name


def key_format(cache_dtype: str, activations: str, rank: int, index_width: int) -> KeyFormat:
    """How keys are cached beside activations of a type ("float32"), whose latents have `rank`
    numbers and whose index keys `index_width`. Raises ConfigError."""
    if cache_dtype == "bfloat16" and activations != "bfloat16":
        raise ConfigError(
            f"--kv-cache-dtype bfloat16: keys are {activations} as activations are, or FP8; "
            "--dtype bfloat16 makes both bfloat16, and --kv-cache-dtype fp8_e4m3 keys smaller."
        )
    if cache_dtype != FP8:
        return ACTIVATION
    if rank % SCALE_BYTES or index_width % SCALE_BYTES:
        raise ConfigError(
            f"--kv-cache-dtype fp8_e4m3: keys of {rank} and {index_width} numbers leave scales "
            "unaligned, as these are no multiples of 4; --kv-cache-dtype auto works."
        )
    return FP8


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
