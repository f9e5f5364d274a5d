"""The product with a dense bf16 matrix, for steps of few tokens.

Such a step is bound by the weights' bytes. One program multiplies a tile of matrix rows, the left
operand of the tensor core, with one tile of token rows over a part of the columns. Weights stay as
they are stored, [out, in] by rows, since cuBLAS takes the same tensor where there are more tokens.
The copy engine brings both operands into a ring in shared memory, whose stages are the bytes in
flight. Sums in parts are added up as in `triton.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tetrad.formats.weights import HoldsTensors
from tetrad.kernels import chain
from tetrad.kernels.experts.grouping import cores_of
from tetrad.kernels.linear.dense_tiles import DenseTile, splits_for, tile_for
from tetrad.kernels.linear.triton_splits import MOST_SPLIT_TILES, place_of, store_product
from tetrad.kernels.triton_support import TensorDescriptor, cdiv, jit, tl

COPY_ALIGNMENT = 16
"""Of an address and of a row, in bytes, for the copy engine (TMA)."""


@dataclass(frozen=True, eq=False)
class DenseLinear(HoldsTensors):
    """A bf16 matrix as stored, and what counts the parts of its sums."""

    weight: Tensor
    """bfloat16 [out, in], by rows."""
    arrived: Tensor
    """int32 [MOST_SPLIT_TILES], zero between calls: the parts of a split sum that are written. It
    belongs to the matrix, so two calls with the same one must not overlap on two streams."""

    @staticmethod
    def of(weight: Tensor) -> DenseLinear:
        """No copy where the rows already follow one another."""
        arrived = torch.zeros(MOST_SPLIT_TILES, dtype=torch.int32, device=weight.device)
        return DenseLinear(weight.contiguous(), arrived)


@jit(do_not_specialize=["num_tokens"])
def dense_product(
    x, w, parts, arrived, out, num_tokens, features,
    BF: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr,
    SPLITS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out [T, features] = x [T, in] times w [features, in]; `DenseTile` explains the sizes.

    x and w are descriptors: the copy engine fills with zeros what lies outside. STEPS of the loop
    for each of SPLITS splits. parts, arrived: see `store_product`.
    """
    chain.after_previous()
    item = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    tiles = (features + BF - 1) // BF
    tile, column = place_of(item, (num_tokens + BM - 1) // BM, tiles, GROUP)
    row, feature, first_k = tile * BM, column * BF, split * (STEPS * BK)
    acc = tl.zeros((BF, BM), tl.float32)
    for step in tl.range(STEPS, num_stages=STAGES):
        k = first_k + step * BK
        weights = w.load([feature, k])
        tokens = x.load([row, k])
        acc = tl.dot(weights, tokens.trans(), acc)
    chain.before_next()
    store_product(
        acc.trans(), 1.0, parts, arrived, out, item, split, row, num_tokens, feature, features,
        BM, BF, SPLITS,
    )  # fmt: skip


def can_be_copied(x: Tensor, weight: Tensor) -> bool:
    """Can the copy engine read both?"""
    width = weight.shape[1] * weight.itemsize
    addresses = (x.data_ptr(), weight.data_ptr(), width)
    return all(number % COPY_ALIGNMENT == 0 for number in addresses)


def product(
    x: Tensor, weight: DenseLinear, tile: DenseTile, splits: int, dtype: torch.dtype
) -> Tensor:
    """Launch `dense_product` for contiguous x [T, in] that `can_be_copied`; [T, out] in `dtype`."""
    w = weight.weight
    num_tokens, (features, width) = len(x), w.shape
    items = cdiv(num_tokens, tile.rows) * cdiv(features, tile.features)
    y = x.new_empty(num_tokens, features, dtype=dtype)
    parts = x.new_empty(splits if splits > 1 else 0, *y.shape, dtype=torch.float32)
    dense_product[(items * splits,)](
        TensorDescriptor.from_tensor(x, [tile.rows, tile.columns]),
        TensorDescriptor.from_tensor(w, [tile.features, tile.columns]),
        parts,
        weight.arrived,
        y,
        num_tokens,
        features,
        BF=tile.features,
        BM=tile.rows,
        BK=tile.columns,
        STEPS=cdiv(cdiv(width, tile.columns), splits),
        SPLITS=splits,
        GROUP=tile.group,
        STAGES=tile.stages,
        num_warps=4,
        **chain.options(),
    )
    return y


def _by_cublas(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == x.dtype:
        return functional.linear(x, weight)
    return torch.mm(x, weight.t(), out_dtype=dtype)


def run(x: Tensor, weight: DenseLinear, dtype: torch.dtype) -> Tensor:
    """x [T, in] times the matrix, in `dtype`: x's own, or fp32. One launch, for which the host
    waits never; large steps, GPUs without a table and rows that are no multiple of 16 bytes go to
    cuBLAS."""
    w = weight.weight
    features, width = w.shape
    capability = torch.cuda.get_device_capability(x.device)
    tile = tile_for(len(x), w.nbytes, capability)
    if tile is None or not len(x):
        return _by_cublas(x, w, dtype)
    rows = x.contiguous()
    if not can_be_copied(rows, w):
        return _by_cublas(rows, w, dtype)
    at_once = tile.at_once(capability)
    splits = splits_for(tile, len(x), features, width, cores_of(x.device), at_once)
    return product(rows, weight, tile, splits, dtype)
