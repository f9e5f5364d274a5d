"""The product with a dense bf16 matrix, for steps of few tokens.

Such a step is bound by the weights' bytes. One program multiplies a tile of matrix rows, the left
operand of the tensor core, with one tile of token rows over a part of the columns. Weights stay as
they are stored, [out, in] by rows, since cuBLAS takes the same tensor where there are more tokens.
Both operands go through a ring in shared memory whose stages are the bytes in flight. Sums in parts
are added up as in `triton.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tetrad.kernels.experts.grouping import cores_of
from tetrad.kernels.linear.dense_tiles import DenseTile, splits_for, tile_for
from tetrad.kernels.linear.triton_splits import MOST_SPLIT_TILES, place_of, store_product
from tetrad.kernels.triton_support import (
    TensorDescriptor,
    cdiv,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    tl,
)

BULK_ALIGNMENT = 16
"""Of an address and of a row, in bytes, for the copy engine."""


@dataclass(frozen=True, eq=False)
class DenseLinear:
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

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.weight.nbytes + self.arrived.nbytes


@jit()
def _bulk_sums(
    x, w, row, feature, first_k,
    BF: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[BF, BM]; the copy engine fills with zeros what lies outside."""
    acc = tl.zeros((BF, BM), tl.float32)
    for step in tl.range(STEPS, num_stages=STAGES):
        k = first_k + step * BK
        weights = w.load([feature, k])
        tokens = x.load([row, k])
        acc = tl.dot(weights, tokens.trans(), acc)
    return acc


@jit()
def _sums(
    x, w, row, feature, first_k, num_tokens, features,
    IN: tl.constexpr, BF: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr,
    IS_WHOLE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[BF, BM]; what lies outside is not read and counts as zero."""
    f = feature + tl.arange(0, BF)
    t = row + tl.arange(0, BM)
    k = first_k + tl.arange(0, BK)
    w_at = w + f.to(tl.int64)[:, None] * IN + k[None, :]
    x_at = x + t.to(tl.int64)[None, :] * IN + k[:, None]
    w_mask = (f < features)[:, None]
    x_mask = (t < num_tokens)[None, :]
    acc = tl.zeros((BF, BM), tl.float32)
    for step in tl.range(STEPS, num_stages=STAGES):
        if IS_WHOLE:
            weights = tl.load(
                w_at + step * BK, mask=w_mask, other=0.0, eviction_policy="evict_first"
            )  # fmt: skip
            tokens = tl.load(x_at + step * BK, mask=x_mask, other=0.0)
        else:
            inside = k + step * BK < IN
            weights = tl.load(
                w_at + step * BK, mask=w_mask & inside[None, :], other=0.0,
                eviction_policy="evict_first",
            )  # fmt: skip
            tokens = tl.load(x_at + step * BK, mask=x_mask & inside[:, None], other=0.0)
        acc = tl.dot(weights, tokens, acc)
    return acc


@jit()
def _ask_for(memory, feature, features, first_k, IN: tl.constexpr, BF: tl.constexpr,
             PIECES: tl.constexpr, AHEAD: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    """AHEAD columns of a tile of weights into the L2 cache, each row in PIECES."""
    piece = tl.arange(0, BF * PIECES)
    f = tl.minimum(feature + piece // PIECES, features - 1)
    at = memory + f.to(tl.int64) * IN + first_k + piece % PIECES * (AHEAD // PIECES)
    tl.inline_asm_elementwise(
        PTX, "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )  # fmt: skip


@jit(do_not_specialize=["num_tokens"])
def dense_product(
    x, w, memory, parts, arrived, out, num_tokens, features,
    IN: tl.constexpr, BF: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr,
    SPLITS: tl.constexpr, IS_WHOLE: tl.constexpr, IS_BULK: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr, AHEAD: tl.constexpr, PIECES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """out [T, features] = x [T, IN] times w [features, IN]; `DenseTile` explains the sizes.

    x and w are descriptors with IS_BULK, else pointers; `memory` is where w lies. STEPS of the
    loop for each of SPLITS splits; IS_WHOLE if they cover IN exactly. parts, arrived: see
    `store_product`. AHEAD, PIECES, PTX: see `_ask_for`.
    """
    item = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    tiles = (features + BF - 1) // BF
    tile, column = place_of(item, (num_tokens + BM - 1) // BM, tiles, GROUP)
    row, feature, first_k = tile * BM, column * BF, split * (STEPS * BK)
    if AHEAD > 0:
        # Whoever comes next may start too; what it reads of ours it waits for.
        gdc_launch_dependents()
        # Only into the cache: whatever is still being written is not read before the wait.
        _ask_for(memory, feature, features, first_k, IN, BF, PIECES, AHEAD, PTX)
        gdc_wait()
    if IS_BULK:
        acc = _bulk_sums(x, w, row, feature, first_k, BF, BM, BK, STEPS, STAGES)
    else:
        acc = _sums(
            x, w, row, feature, first_k, num_tokens, features,
            IN, BF, BM, BK, STEPS, IS_WHOLE, STAGES,
        )  # fmt: skip
    store_product(
        acc.trans(), 1.0, parts, arrived, out, item, split, row, num_tokens, feature, features,
        BM, BF, SPLITS,
    )  # fmt: skip


def can_be_bulk(x: Tensor, weight: Tensor) -> bool:
    """Can the copy engine take both?"""
    width = weight.shape[1] * weight.itemsize
    addresses = (x.data_ptr(), weight.data_ptr(), width)
    return all(number % BULK_ALIGNMENT == 0 for number in addresses)


def product(
    x: Tensor, weight: DenseLinear, tile: DenseTile, splits: int, dtype: torch.dtype
) -> Tensor:
    """Launch `dense_product` for contiguous x [T, in]; [T, out] in `dtype`."""
    w = weight.weight
    num_tokens, (features, width) = len(x), w.shape
    items = cdiv(num_tokens, tile.rows) * cdiv(features, tile.features)
    steps = cdiv(cdiv(width, tile.columns), splits)
    y = x.new_empty(num_tokens, features, dtype=dtype)
    parts = x.new_empty(splits if splits > 1 else 0, *y.shape, dtype=torch.float32)
    is_bulk = tile.is_bulk and can_be_bulk(x, w)
    is_whole = width == steps * splits * tile.columns
    ahead = min(tile.ahead, steps * tile.columns) if is_bulk and is_whole else 0
    pieces = max(1, tile.warps * 32 // tile.features)
    dense_product[(items * splits,)](
        TensorDescriptor.from_tensor(x, [tile.rows, tile.columns]) if is_bulk else x,
        TensorDescriptor.from_tensor(w, [tile.features, tile.columns]) if is_bulk else w,
        w,
        parts,
        weight.arrived,
        y,
        num_tokens,
        features,
        IN=width,
        BF=tile.features,
        BM=tile.rows,
        BK=tile.columns,
        STEPS=steps,
        SPLITS=splits,
        IS_WHOLE=is_whole,
        IS_BULK=is_bulk,
        GROUP=tile.group,
        STAGES=tile.stages,
        AHEAD=ahead,
        PIECES=pieces,
        PTX=f"cp.async.bulk.prefetch.L2.global [$1], {ahead // pieces * 2}; mov.u32 $0, 0;",
        num_warps=tile.warps,
        launch_pdl=ahead > 0,
    )
    return y


def run(x: Tensor, weight: DenseLinear, dtype: torch.dtype) -> Tensor:
    """x [T, in] times the matrix, in `dtype`: x's own, or fp32. One launch, for which the host
    waits never; large steps, and what has not been measured, go to cuBLAS."""
    capability = torch.cuda.get_device_capability(x.device)
    tile = tile_for(len(x), capability)
    if tile is None or not len(x):
        if dtype == x.dtype:
            return functional.linear(x, weight.weight)
        return torch.mm(x, weight.weight.t(), out_dtype=dtype)
    features, width = weight.weight.shape
    at_once = tile.at_once(capability)
    splits = splits_for(tile, len(x), features, width, cores_of(x.device), at_once)
    return product(x.contiguous(), weight, tile, splits, dtype)
