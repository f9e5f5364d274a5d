"""The linear layer over NVFP4, FP8 and bf16 weights, with bf16 activations.

One program multiplies one packed weight tile (128 matrix rows) with one tile of token rows, over a
part of the columns. The weights are the left operand: they are decoded into the registers from
which the tensor core reads them, as in `experts/triton.py`.

A step of few tokens is bound by the weights' bytes, and a matrix has few tiles: 16 where there are
2048 rows, on a GPU of 132 multiprocessors. So the columns are split, every part is written in fp32,
and whoever of a tile comes last adds them up in the order of the columns. Who that is varies, what
comes out does not.

Dense weights have a kernel of their own, in `triton_dense.py`.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from tetrad.formats.weights import (
    DenseWeight,
    Int4Weight,
    Int8BlockWeight,
    Int8Weight,
    Weight,
)
from tetrad.kernels import chain
from tetrad.kernels.backend import Backend
from tetrad.kernels.experts.decode import HAS_BF16_MUL, decode_fp8_ptx, decode_ptx
from tetrad.kernels.experts.grouping import cores_of
from tetrad.kernels.experts.tiles import Capability
from tetrad.kernels.experts.triton_sums import fp8_sums, nvfp4_sums
from tetrad.kernels.linear import reference, triton_dense
from tetrad.kernels.linear.packed import PackedLinear, pack
from tetrad.kernels.linear.tiles import LinearTile, fitted, splits_for, tile_for
from tetrad.kernels.linear.triton_dense import DenseLinear
from tetrad.kernels.linear.triton_splits import place_of, store_product
from tetrad.kernels.triton_support import cdiv, is_interpreted, jit, tl, why_not

_log = logging.getLogger(__name__)

Prepared = PackedLinear | DenseLinear | Weight


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
    chain.after_previous()
    item = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    tile, column = place_of(item, (num_tokens + BM - 1) // BM, TILES, GROUP)
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
    chain.before_next()
    store_product(
        acc.trans(), factor, parts, arrived, out, item, split, tile * BM, num_tokens, column * 128,
        OUT, BM, 128, SPLITS,
    )  # fmt: skip


def prepare(weight: Weight, dtype: torch.dtype) -> Prepared:
    """Pack a quantised weight, but decode integers; leave a dense one as it is. Other activations
    than bf16 stay with plain torch."""
    if isinstance(weight, DenseWeight | Int4Weight | Int8Weight | Int8BlockWeight):
        if dtype != torch.bfloat16:
            return reference.prepare(weight, dtype)
        return DenseLinear.of(weight.dequantize(dtype))
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
        **chain.options(),
    )
    return y


def run(x: Tensor, weight: Prepared) -> Tensor:
    """One launch, for which the host waits never; large steps over dense weights go to cuBLAS."""
    if isinstance(weight, DenseLinear):
        return triton_dense.run(x, weight, x.dtype)
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
