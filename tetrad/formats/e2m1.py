"""E2M1: the four-bit float inside NVFP4 (OCP Microscaling Formats v1.0, section 5.3.3).

    code    0    1    2    3    4    5    6    7      bit 3 is the sign
    value   0   0.5   1   1.5   2    3    4    6      there is no infinity and no NaN

Two codes share a byte: the even column in the low nibble, the odd column in the high one.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

E2M1_MAX = 6.0
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = E2M1_MAGNITUDES + tuple(-value for value in E2M1_MAGNITUDES)
"""The value of each of the 16 codes; code 8 is negative zero."""

_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_MIDPOINTS_ROUNDING_UP = (0.75, 1.75, 3.5)
"""Midpoints whose even neighbour (mantissa bit 0) is the upper one."""


def pack(nibbles: Tensor) -> Tensor:
    """u8[..., n] codes below 16 → u8[..., n/2] bytes. n is even."""
    assert nibbles.shape[-1] % 2 == 0, "an odd number of codes does not fill whole bytes"
    return (nibbles[..., 1::2] << 4) | nibbles[..., 0::2]


def unpack(packed: Tensor) -> Tensor:
    """u8[..., n/2] bytes → u8[..., n] codes below 16."""
    return torch.stack((packed & 0x0F, packed >> 4), dim=-1).flatten(-2)


def decode(packed: Tensor) -> Tensor:
    """u8[..., n/2] bytes → float32[..., n] values, exactly."""
    return _byte_table(packed.device)[packed.int()].flatten(-2)


@cache
def _byte_table(device: torch.device) -> Tensor:
    """[256, 2]: the even and the odd column's value of each byte."""
    every_byte = torch.arange(256, dtype=torch.uint8)
    values = torch.tensor(E2M1_VALUES, dtype=torch.float32)
    return values[unpack(every_byte[:, None]).long()].to(device)


def encode(values: Tensor) -> Tensor:
    """float32[..., n] → u8[..., n] codes of the nearest value, ties to the even mantissa.

    Magnitudes above 6 saturate. Negative values that round to zero keep their sign (code 8), and
    -0.0 is code 0: both as NVIDIA's exporter writes them.
    """
    magnitude = values.abs()
    code = torch.bucketize(magnitude, torch.tensor(_MIDPOINTS, device=values.device))
    for midpoint in _MIDPOINTS_ROUNDING_UP:
        code += magnitude == midpoint
    return (code + 8 * (values < 0)).to(torch.uint8)
