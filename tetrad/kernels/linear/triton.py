"""The linear layer over NVFP4 and FP8 weights, with bf16 activations.

One program multiplies one packed weight tile (128 matrix rows) with one tile of token rows, over a
part of the columns. The weights are the left operand: they are decoded into the registers from
which the tensor core reads them, as in `experts/triton.py`.

A step of few tokens is bound by the weights' bytes, and a matrix has few tiles: 16 where there are
2048 rows, on a GPU of 132 multiprocessors. So the columns are split, every part is written in fp32,
and whoever of a tile comes last adds them up in the order of the columns. Who that is varies, what
comes out does not.

Dense weights are torch's business, which is cuBLAS's.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from tetrad.formats.weights import DenseWeight, Weight
from tetrad.kernels.backend import Backend
from tetrad.kernels.experts.decode import HAS_BF16_MUL, decode_fp8_ptx, decode_ptx
from tetrad.kernels.experts.grouping import cores_of
from tetrad.kernels.experts.tiles import Capability
from tetrad.kernels.experts.triton_sums import fp8_sums, nvfp4_sums
from tetrad.kernels.linear import reference
from tetrad.kernels.linear.packed import PackedLinear, pack
from tetrad.kernels.linear.tiles import LinearTile, fitted, splits_for, tile_for
from tetrad.kernels.triton_support import cdiv, is_interpreted, jit, tl, why_not

_log = logging.getLogger(__name__)

Prepared = PackedLinear | Weight


@jit()
def _place_of(item, token_tiles, TILES: tl.constexpr, GROUP: tl.constexpr):
    """Token tile and weight tile of a program; GROUP token tiles share the weights they read."""
    group = item // (GROUP * TILES)
    size = tl.minimum(token_tiles - group * GROUP, GROUP)
    inside = item - group * (GROUP * TILES)
    return group * GROUP + inside % size, inside // size


@jit()
def _sum_of_splits(
    parts, out, factor, row, num_tokens, column,
    OUT: tl.constexpr, BM: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Write a tile of `out`: its parts, always added in the same order.

    A few rows at a time, so that the parts of all splits can be on their way at once.
    """
    ROWS: tl.constexpr = 16 if SPLITS > 4 or BM < 32 else 32
    feature = column * 128 + tl.arange(0, 128)
    stride = num_tokens.to(tl.int64) * OUT
    for first in tl.range(0, BM, ROWS):
        token = row + first + tl.arange(0, ROWS)
        at = token.to(tl.int64)[:, None] * OUT + feature[None, :]
        mask = (token < num_tokens)[:, None] & (feature < OUT)[None, :]
        y = tl.zeros((ROWS, 128), tl.float32)
        for split in tl.static_range(SPLITS):
            # past the L1 cache: other multiprocessors wrote this
            part_at = parts + split * stride + at
            y += tl.load(part_at, mask=mask, other=0.0, cache_modifier=".cg")
        tl.store(out + at, (y * factor).to(out.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["num_tokens"])
def split_product(
    x, words, scales, global_scale, parts, arrived, out, num_tokens,
    OUT: tl.constexpr, IN: tl.constexpr, IS_FP8: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr, STEPS: tl.constexpr, SPLITS: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """out [T, OUT] = x [T, IN] times the packed matrix; `LinearTile` explains the sizes.

    STEPS of the loop for each of SPLITS splits. parts: fp32 [SPLITS, T, OUT], written where there
    is more than one. arrived: int32, one for each tile of `out`, zero before and after.
    """
    TILES: tl.constexpr = (OUT + 127) // 128
    item = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    tile, column = _place_of(item, (num_tokens + BM - 1) // BM, TILES, GROUP)
    row = tile * BM + tl.arange(0, BM)
    first_k = split * (STEPS * BK) + tl.arange(0, BK)
    factor = tl.load(global_scale)
    # Rows past the last read some token or other: if it were always the same, its part of the L2
    # cache would hold everybody up.
    x_at = x + (row % num_tokens).to(tl.int64)[None, :] * IN + first_k[:, None]
    first_step = (column * SPLITS + split).to(tl.int64) * STEPS
    if IS_FP8:
        word_at = words + first_step * (BK * 16) + tl.arange(0, BK * 16)
        acc = fp8_sums(
            word_at, scales + column * ((IN + 127) // 128), x_at, first_k[:, None],
            split * (STEPS * BK), IN, False, BM, BK, STEPS, STAGES, PTX,
        )  # fmt: skip
    else:
        word_at = words + first_step * (BK * 8) + tl.arange(0, BK * 8)
        scale_at = scales + first_step * (BK * 2) + tl.arange(0, BK * 2)
        acc = nvfp4_sums(
            word_at, scale_at, x_at, first_k[:, None], IN, BM, BK, STEPS, STAGES, PTX,
        )  # fmt: skip
    y = acc.trans()
    feature = column * 128 + tl.arange(0, 128)
    at = row.to(tl.int64)[:, None] * OUT + feature[None, :]
    mask = (row < num_tokens)[:, None] & (feature < OUT)[None, :]
    if SPLITS == 1:
        tl.store(out + at, (y * factor).to(out.dtype.element_ty), mask=mask)
    else:
        stride = num_tokens.to(tl.int64) * OUT
        tl.store(parts + split * stride + at, y, mask=mask)
        # every thread's part before the one thread that counts
        tl.debug_barrier()
        before = tl.atomic_add(arrived + item, 1, sem="acq_rel", scope="gpu")
        if before == SPLITS - 1:
            _sum_of_splits(parts, out, factor, tile * BM, num_tokens, column, OUT, BM, SPLITS)
            tl.store(arrived + item, 0)


def prepare(weight: Weight, dtype: torch.dtype) -> Prepared:
    """Pack a quantised weight; dense ones, and other activations, stay with plain torch."""
    if isinstance(weight, DenseWeight):
        return reference.prepare(weight, dtype)
    if dtype != torch.bfloat16:
        _tell_once(f"activations are {str(dtype).removeprefix('torch.')} and not bfloat16")
        return reference.prepare(weight, dtype)
    return pack(weight)


@functools.cache
def _tell_once(reason: str) -> None:
    _log.warning("Quantised linears run on plain torch, many times slower: %s.", reason)


def product(
    x: Tensor, weight: PackedLinear, tile: LinearTile, splits: int, capability: Capability
) -> Tensor:
    """Launch `split_product` for contiguous x [T, in]; `tile` fits, `splits` divides its steps."""
    num_tokens = len(x)
    items = cdiv(num_tokens, tile.rows) * weight.num_tiles
    y = x.new_empty(num_tokens, weight.features)
    parts = x.new_empty(splits if splits > 1 else 0, *y.shape, dtype=torch.float32)
    has_bf16_mul = capability >= HAS_BF16_MUL
    ptx = decode_ptx(has_bf16_mul) if weight.bits == 4 else decode_fp8_ptx(has_bf16_mul)
    split_product[(items * splits,)](
        x,
        weight.words,
        weight.scales,
        weight.global_scale,
        parts,
        weight.arrived,
        y,
        num_tokens,
        OUT=weight.features,
        IN=weight.width,
        IS_FP8=weight.bits == 8,
        BM=tile.rows,
        BK=tile.columns,
        STEPS=weight.packed_width // tile.columns // splits,
        SPLITS=splits,
        GROUP=tile.group,
        STAGES=tile.stages,
        PTX="" if is_interpreted() else ptx,
        num_warps=tile.warps,
    )
    return y


def run(x: Tensor, weight: Prepared) -> Tensor:
    """One launch, for which the host waits never; dense weights go to cuBLAS."""
    if not isinstance(weight, PackedLinear):
        return reference.run(x, weight)
    capability = torch.cuda.get_device_capability(x.device)
    width = weight.packed_width
    tile = fitted(tile_for(len(x), capability, weight.bits), width, capability, weight.bits)
    splits = splits_for(
        tile,
        len(x),
        weight.num_tiles,
        width,
        cores_of(x.device),
        tile.at_once(capability, weight.bits),
    )
    return product(x.contiguous(), weight, tile, splits, capability)


BACKEND = Backend("triton", run, why_not, prepare)
