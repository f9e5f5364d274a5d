"""Latents and cached keys in one launch: of a token's programs one norms its query latent, one
makes its key, and one its index key. Offsets into pools are 64 bits wide, for pools past 2^31
elements."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.core.step import PAGE_TOKENS
from tetrad.kernels import chain
from tetrad.kernels.backend import Backend
from tetrad.kernels.e4m3 import BLOCK, encode, measure, scale_for
from tetrad.kernels.rms_norm.triton import normalised
from tetrad.kernels.rope.triton import angles_of, column_of, turn
from tetrad.kernels.triton_support import constexpr, jit, next_power_of_2, row_warps, tl, why_not

PAGE = constexpr(PAGE_TOKENS)


@jit()
def _norm_query(source, weight, target, eps, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.arange(0, COLUMNS)
    is_inside = column < WIDTH
    value = tl.load(source + column, mask=is_inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=is_inside, other=0.0).to(tl.float32)
    result = normalised(value, scale, eps, WIDTH)
    tl.store(target + column, result.to(target.dtype.element_ty), mask=is_inside)


@jit()
def _turned(values, c, s, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """fp32 [2 * PAIRS], rotated."""
    rows = turn(values[None, :], c[None, :], s[None, :], 1, PAIRS, INTERLEAVED)
    return rows.reshape([2 * PAIRS])


@jit()
def _write_key(
    pool, slot, latent, turned,
    RANK: tl.constexpr, RANK_COLUMNS: tl.constexpr, NUM_PAIRS: tl.constexpr, PAIRS: tl.constexpr,
    IS_FP8: tl.constexpr,
):  # fmt: skip
    """The one place that knows how a key lies in its slot: fp32 latent [RANK_COLUMNS] and rotated
    key [2 * PAIRS] side by side, in the pool's type; or codes, their scales, and the latter."""
    if IS_FP8:
        GROUP: tl.constexpr = RANK_COLUMNS if RANK_COLUMNS < BLOCK else BLOCK
        GROUPS: tl.constexpr = RANK_COLUMNS // GROUP
        SCALES: tl.constexpr = (RANK + BLOCK - 1) // BLOCK
        target = pool + slot * (RANK + 4 * SCALES + 4 * NUM_PAIRS)
        blocks = latent.reshape(GROUPS, GROUP)
        largest, is_finite = measure(blocks, 1)
        scales = scale_for(largest, is_finite)
        group = tl.arange(0, GROUPS)
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        tl.store(target + column, encode(blocks, scales[:, None]), mask=column < RANK)
        behind = (target + RANK).to(tl.pointer_type(tl.float32))
        tl.store(behind + group, scales, mask=group < SCALES)
        rotary = (target + RANK + 4 * SCALES).to(tl.pointer_type(tl.bfloat16))
        rounded = turned.to(tl.bfloat16)
    else:
        target = pool + slot * (RANK + 2 * NUM_PAIRS)
        column = tl.arange(0, RANK_COLUMNS)
        tl.store(target + column, latent.to(pool.dtype.element_ty), mask=column < RANK)
        rotary = target + RANK
        rounded = turned.to(pool.dtype.element_ty)
    column = tl.arange(0, 2 * PAIRS)
    tl.store(rotary + column, rounded, mask=column < 2 * NUM_PAIRS)


@jit()
def _store_key(
    source, weight, c, s, pool, slot, eps,
    RANK: tl.constexpr, RANK_COLUMNS: tl.constexpr, NUM_PAIRS: tl.constexpr, PAIRS: tl.constexpr,
    IS_FP8: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, RANK_COLUMNS)
    is_inside = column < RANK
    value = tl.load(source + column, mask=is_inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=is_inside, other=0.0).to(tl.float32)
    latent = normalised(value, scale, eps, RANK)
    column = tl.arange(0, 2 * PAIRS)
    tail = tl.load(source + RANK + column, mask=column < 2 * NUM_PAIRS, other=0.0).to(tl.float32)
    turned = _turned(tail, c, s, PAIRS, True)
    _write_key(pool, slot, latent, turned, RANK, RANK_COLUMNS, NUM_PAIRS, PAIRS, IS_FP8)


@jit()
def _store_index_key(
    source, weight, bias, c, s, pool, slot, eps,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, NUM_PAIRS: tl.constexpr, PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr, IS_FP8: tl.constexpr,
):  # fmt: skip
    """The variance is that of the deviations, not a difference of two large sums. The columns to
    rotate are read once more, in the order in which they lie in registers to be rotated."""
    column = tl.arange(0, COLUMNS)
    is_inside = column < WIDTH
    value = tl.load(source + column, mask=is_inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=is_inside, other=0.0)
    shift = tl.load(bias + column, mask=is_inside, other=0.0)
    mean = tl.sum(value) / WIDTH
    deviation = tl.where(is_inside, value - mean, 0.0)
    factor = tl.rsqrt(tl.sum(deviation * deviation) / WIDTH + eps)
    normed = deviation * factor * scale + shift
    is_rest = is_inside & (column >= 2 * NUM_PAIRS)
    rest = tl.where(is_rest, normed, 0.0)
    rest_column = column
    column, is_pair = column_of(tl.arange(0, 2 * PAIRS), NUM_PAIRS, PAIRS, INTERLEAVED)
    value = tl.load(source + column, mask=is_pair, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=is_pair, other=0.0)
    shift = tl.load(bias + column, mask=is_pair, other=0.0)
    turned = _turned((value - mean) * factor * scale + shift, c, s, PAIRS, INTERLEAVED)
    if IS_FP8:
        page, offset = pool + slot // PAGE * (PAGE * (WIDTH + 4)), slot % PAGE
        largest, is_finite = measure(rest, 0)
        turned_largest, turned_is_finite = measure(tl.where(is_pair, turned, 0.0), 0)
        scale = scale_for(
            tl.maximum(largest, turned_largest), tl.minimum(is_finite, turned_is_finite)
        )
        behind = (page + PAGE * WIDTH).to(tl.pointer_type(tl.float32))
        tl.store(behind + offset, scale)
        target = page + offset * WIDTH
        rest, turned = encode(rest, scale), encode(turned, scale)
    else:
        target = pool + slot * WIDTH
        rest = rest.to(pool.dtype.element_ty)
        turned = turned.to(pool.dtype.element_ty)
    tl.store(target + rest_column, rest, mask=is_rest)
    tl.store(target + column, turned, mask=is_pair)


@jit()
def latents_kernel(
    query, key, index_key, query_weight, key_weight, index_weight, index_bias, latent,
    cos, sin, slots, pool, index_pool, query_stride, key_stride, index_stride, eps, index_eps,
    QUERY_WIDTH: tl.constexpr, QUERY_COLUMNS: tl.constexpr,
    RANK: tl.constexpr, RANK_COLUMNS: tl.constexpr, NUM_PAIRS: tl.constexpr, PAIRS: tl.constexpr,
    INDEX_WIDTH: tl.constexpr, INDEX_COLUMNS: tl.constexpr, INDEX_INTERLEAVED: tl.constexpr,
    IS_FP8: tl.constexpr,
):  # fmt: skip
    """Strides are from row to row; INDEX_WIDTH 0: there is no index key."""
    chain.after_previous()
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    chain.before_next()
    if part == 0:
        target = latent + token * QUERY_WIDTH
        source = query + token * query_stride
        _norm_query(source, query_weight, target, eps, QUERY_WIDTH, QUERY_COLUMNS)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        c, s = angles_of(cos, sin, token, NUM_PAIRS, PAIRS)
        if part == 1:
            _store_key(
                key + token * key_stride, key_weight, c, s, pool, slot, eps,
                RANK, RANK_COLUMNS, NUM_PAIRS, PAIRS, IS_FP8,
            )  # fmt: skip
        elif INDEX_WIDTH > 0:
            _store_index_key(
                index_key + token * index_stride, index_weight, index_bias, c, s,
                index_pool, slot, index_eps,
                INDEX_WIDTH, INDEX_COLUMNS, NUM_PAIRS, PAIRS, INDEX_INTERLEAVED, IS_FP8,
            )  # fmt: skip


def run(
    query: Tensor,
    key: Tensor,
    index_key: Tensor | None,
    query_weight: Tensor,
    key_weight: Tensor,
    index_weight: Tensor | None,
    index_bias: Tensor | None,
    eps: float,
    index_eps: float,
    cos: Tensor,
    sin: Tensor,
    index_interleaved: bool,
    slots: Tensor,
    pool: Tensor,
    index_pool: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Columns of the first three must lie side by side; all else must be contiguous."""
    assert pool.is_contiguous()
    assert index_pool is None or index_pool.is_contiguous()
    num_tokens, query_width = query.shape
    rank, num_pairs = len(key_weight), cos.shape[1]
    index_width = 0 if index_key is None else index_key.shape[1]
    latent = query_weight.new_empty(num_tokens, query_width)
    columns = next_power_of_2(query_width)
    latents_kernel[(num_tokens, 3 if index_width else 2)](
        query, key, index_key, query_weight, key_weight, index_weight, index_bias, latent,
        cos, sin, slots, pool, index_pool, query.stride(0), key.stride(0),
        0 if index_key is None else index_key.stride(0), eps, index_eps,
        query_width, columns, rank, next_power_of_2(rank), num_pairs, next_power_of_2(num_pairs),
        index_width, next_power_of_2(index_width), index_interleaved, pool.dtype == torch.uint8,
        num_warps=row_warps(columns), **chain.options(),
    )  # fmt: skip
    return latent, pool, index_pool


BACKEND = Backend("triton", run, why_not)
