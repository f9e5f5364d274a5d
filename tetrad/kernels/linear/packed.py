"""A quantised matrix as the Triton kernel takes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tetrad.formats.weights import Fp8BlockWeight, Fp8TensorWeight, HoldsTensors, Nvfp4Weight
from tetrad.kernels.experts import packing, packing_fp8, triton_packing
from tetrad.kernels.linear.triton_splits import MOST_SPLIT_TILES

Quantised = Nvfp4Weight | Fp8BlockWeight | Fp8TensorWeight


@dataclass(frozen=True, eq=False)
class PackedLinear(HoldsTensors):
    """One matrix in tile order."""

    words: Tensor
    """int64 [tiles, granules, words], in the order of `packing.py` (4 bits) or `packing_fp8.py`"""
    scales: Tensor
    """4 bits: int32 [tiles, granules, scales]. 8 bits: float32 [tiles, blocks of columns]"""
    global_scale: Tensor
    """float32 [1]; 1 for FP8"""
    arrived: Tensor
    """int32 [MOST_SPLIT_TILES], zero between calls: the parts of a split sum that are written. It
    belongs to the matrix, so two calls with the same one must not overlap on two streams."""
    bits: int
    """Of a weight in memory, scales apart: 4 or 8."""
    features: int
    """Rows of the matrix."""
    width: int
    """Columns of the matrix."""

    @property
    def num_tiles(self) -> int:
        """Tiles of 128 rows."""
        return len(self.words)

    @property
    def packed_width(self) -> int:
        """Columns with what fills them up to whole granules, or whole blocks for FP8."""
        columns = packing.GRANULE_COLUMNS if self.bits == 4 else packing_fp8.GRANULE_COLUMNS
        return self.words.shape[1] * columns


def pack(weight: Quantised) -> PackedLinear:
    """Convert a matrix, on its device; every value is kept exactly."""
    stack = type(weight)(**{name: part[None] for name, part in weight.tensors().items()})
    arrived = torch.zeros(MOST_SPLIT_TILES, dtype=torch.int32, device=weight.device)
    if isinstance(stack, Nvfp4Weight):
        nvfp4 = triton_packing.pack((stack,))
        return PackedLinear(
            nvfp4.words[0], nvfp4.scales[0], nvfp4.global_scale[0], arrived, 4, *weight.shape
        )
    fp8 = packing_fp8.pack_fp8((stack,))
    one = torch.ones(1, device=weight.device)
    return PackedLinear(fp8.words[0], fp8.scales[0, ..., 0], one, arrived, 8, *weight.shape)
