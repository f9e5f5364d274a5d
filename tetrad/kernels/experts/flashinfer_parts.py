"""What the three backends of FlashInfer, an optional package, have in common.

Its fused kernels take a layer's rows, its routing and NVFP4 weights, and return the weighted sum;
activations go through the tensor cores in NVFP4 too. Read from the sources of version 0.7.4: which
GPUs a kernel is for, the order in which rows and block scales lie, which factors it applies. None
of it has been run on hardware.

Block scales lie in tiles of 128 rows and 4 columns, 512 bytes each, tile after tile along a row
(`flashinfer/cute_dsl/utils.py`, `convert_sf_to_mma_layout`): scale (m, k) of a tile is byte
(m % 32) * 16 + (m // 32) * 4 + k. The upper half of the first product's rows is up, the lower gate.

A slot that is dropped has id -1. All three skip what is not between their first and last expert,
as they do on a rank of many (`RoutingKernel.cuh`, `isLocalExpert`; `cutlass_fused_moe_kernels.cuh`,
`is_valid_expert` and `finalizeMoeRoutingKernel`).
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from tetrad.core.extras import install
from tetrad.core.hardware import DeviceSnapshot
from tetrad.kernels import triton_support
from tetrad.kernels.experts.nvfp4_stacks import Nvfp4Experts

INSTALL = install("flashinfer")
SCALE_ROWS, SCALE_COLUMNS = 128, 4
"""Block scales of one tile."""

Capabilities = tuple[tuple[int, int], ...]


def why_not(
    device: DeviceSnapshot, capabilities: Capabilities, packages: tuple[str, ...]
) -> str | None:
    """None, or why a kernel for GPUs of `capabilities` cannot run, and what would cure it."""
    if (reason := triton_support.why_not(device)) is not None:
        return reason
    assert device.compute_capability is not None
    if device.compute_capability not in capabilities:
        found, *listed = (f"{a}.{b}" for a, b in (device.compute_capability, *capabilities))
        needed = f"{', '.join(listed[:-1])} or {listed[-1]}"
        return (
            f"needs compute capability {needed} (Blackwell), this GPU has {found}; 'triton' is for "
            f"every GPU from 8.0 on"
        )
    for package in packages:
        if importlib.util.find_spec(package) is None:
            return f"the package {package!r} is not installed; `{INSTALL}` installs it"
    return None


def load(function: str) -> Any:
    """A function of `flashinfer.fused_moe`."""
    return getattr(importlib.import_module("flashinfer.fused_moe"), function)


def joined(weight: Nvfp4Experts) -> tuple[Tensor, Tensor]:
    """Codes [E, 2F, D / 2] and block scales [E, 2F, D / 16] as bytes, up before gate."""
    parts = (weight.up, weight.gate)
    codes = torch.cat([part.codes for part in parts], dim=1)
    return codes, torch.cat([part.scales.view(torch.uint8) for part in parts], dim=1)


def in_tiles(scales: Tensor) -> Tensor:
    """Bytes [E, M, K] as the tiles lie in memory: [E, M / 128, K / 4, 32, 4, 4].

    M and K are filled with zeros up to whole tiles.
    """
    experts, rows, columns = scales.shape
    missing = (0, -columns % SCALE_COLUMNS, 0, -rows % SCALE_ROWS)
    whole = torch.nn.functional.pad(scales, missing)
    tiles = whole.view(experts, -1, 4, 32, whole.shape[2] // SCALE_COLUMNS, SCALE_COLUMNS)
    return tiles.permute(0, 1, 4, 3, 2, 5).contiguous()


def in_rows(tiles: Tensor) -> Tensor:
    """Tiles [E, M / 128, K / 4, 32, 4, 4] as a matrix of the same bytes, [E, M, K]."""
    experts, row_tiles, column_tiles = tiles.shape[:3]
    return tiles.reshape(experts, row_tiles * SCALE_ROWS, column_tiles * SCALE_COLUMNS)


def finished(y: Tensor, *added: Tensor | None) -> Tensor:
    """What the kernel gave plus `shared` and `residual`, each sum rounded."""
    for rows in added:
        if rows is not None:
            y = y + rows
    return y
