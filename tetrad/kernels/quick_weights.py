"""Random weights in a stored format, made on the device without quantising anything."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.formats.weights import (
    NVFP4_BLOCK,
    DenseWeight,
    Fp8BlockWeight,
    Fp8TensorWeight,
    Nvfp4Weight,
    Weight,
    block_grid,
)

_E2M1_RMS = 2.93
"""Root mean square of a uniformly drawn e2m1 code's value."""
_SCALE_RMS = 2.53
"""Root mean square of the block scales drawn below, uniform between 0.25 and 4.25."""


def draw(
    generator: torch.Generator, dtype: torch.dtype, format_name: str, shape: tuple[int, ...]
) -> Weight:
    """[..., out, in] on the generator's device; gain near 1. Every code and sign occurs, and no two
    scales are alike."""
    device, gain = generator.device, shape[-1] ** -0.5
    if format_name == "nvfp4":
        return _nvfp4(generator, shape)
    values = torch.randn(*shape, generator=generator, device=device)
    if format_name == "bf16":
        return DenseWeight((values * gain).to(dtype))
    data = values.to(torch.float8_e4m3fn)
    is_one_scale = format_name == "fp8_tensor"
    grid = shape[:-2] if is_one_scale else (*shape[:-2], *block_grid(*shape[-2:]))
    scales = gain * (0.75 + torch.rand(grid, generator=generator, device=device) / 2)
    return Fp8TensorWeight(data, scales) if is_one_scale else Fp8BlockWeight(data, scales)


def _nvfp4(generator: torch.Generator, shape: tuple[int, ...]) -> Nvfp4Weight:
    *stack, out, width = shape
    device = generator.device
    codes = torch.randint(
        256, (*stack, out, width // 2), generator=generator, device=device, dtype=torch.uint8
    )
    blocks: Tensor = torch.rand(
        *stack, out, width // NVFP4_BLOCK, generator=generator, device=device
    )
    scales = (blocks * 4 + 0.25).to(torch.float8_e4m3fn)
    mean = width**-0.5 / (_E2M1_RMS * _SCALE_RMS)
    spread = 0.5 + torch.rand(tuple(stack), generator=generator, device=device)
    return Nvfp4Weight(codes, scales, spread * mean)
