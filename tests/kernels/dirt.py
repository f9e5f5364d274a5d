"""Memory that shows what a kernel did not write, or should not have read."""

from __future__ import annotations

import torch


def dirty_memory(largest: int = 1 << 28) -> None:
    """Leave NaN (as integers: -1) in what the GPU's allocator hands out next, blocks of up to
    `largest` bytes."""
    powers = range(9, largest.bit_length())
    dirt = [torch.full((1 << power,), 0xFF, dtype=torch.uint8, device="cuda") for power in powers]
    del dirt
