"""Latent attention on Hopper, with the copies of keys where the work on the keys before hides them.

As `triton.py`, with one loop written out: the copy of a tile of keys begins as soon as the tile
before the last one is done with, and goes on under all of the last one's work. Both warpgroups
compute half of the scores each, exchange weights through shared memory, and sum half of the values
each; every operand of wgmma lies in shared memory.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tetrad.core.step import PAGE_TOKENS
from tetrad.kernels import chain
from tetrad.kernels.backend import Backend
from tetrad.kernels.experts.gluon import why_not
from tetrad.kernels.experts.gluon_parts import barrier, copy, gl, hopper, jit, start_copy
from tetrad.kernels.mla import triton as portable
from tetrad.kernels.mla.gluon_fp8 import attend_fp8_kernel
from tetrad.kernels.mla.gluon_parts import (
    buffers,
    finish,
    fold,
    load_queries,
    pages_of,
    part_of,
    place,
    positions,
    reach,
    score_tile,
    seen_by,
)
from tetrad.kernels.mla.tiles import WIDE
from tetrad.kernels.ragged import Ragged
from tetrad.kernels.triton_support import cdiv, next_power_of_2

LATENT, ROTARY = 512, 64
"""Widths of the keys that it is written for."""
WARPS = 8
FEWEST_HEADS = 17
"""Fewer fill a tile of `triton.py`, which leaves less of its products empty. Decodes of as few as
these are bound by the bytes of keys, however full the products."""


@jit()
def _copy_keys(
    latents, rotaries, stage, pool, position, page,
    C: gl.constexpr, R: gl.constexpr, PAGE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Start the copy of a tile of keys; zeros where there is none, whatever the pool has there."""
    slot = page.to(gl.int64) * PAGE + position % PAGE
    key = (pool + slot * (C + R)).expand_dims(1)
    is_key = (position >= 0).expand_dims(1)
    column = gl.arange(0, C, layout=gl.SliceLayout(0, LAYOUT)).expand_dims(0)
    start_copy(latents.index(stage), key + column, mask=is_key & (column < C))
    column = gl.arange(0, R, layout=gl.SliceLayout(0, LAYOUT)).expand_dims(0)
    start_copy(rotaries.index(stage), key + C + column, mask=is_key & (column < R))
    copy.commit_group()


@jit(
    do_not_specialize=["page_stride", "num_sequences", "num_splits"],
    do_not_specialize_on_alignment=["query_start", "kv_lens", "page_table"],
)
def attend_kernel(
    queries, pool, selected, query_start, kv_lens, page_table, out, log_sums, factor,
    page_stride, num_sequences, num_splits,
    H: gl.constexpr, C: gl.constexpr, R: gl.constexpr, TOPK: gl.constexpr,
    ONE_EACH: gl.constexpr, IS_SPLIT: gl.constexpr, TOPK_PADDED: gl.constexpr,
    BH: gl.constexpr, BT: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """As `triton.attend_kernel`; scores times `factor` are in powers of two."""
    KEYS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BT // 2, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, C // 2, 16])
    first_head, row, part = place(num_splits, H, BH)
    seen, pages = seen_by(
        row, query_start, kv_lens, page_table, page_stride, num_sequences, ONE_EACH
    )
    chosen = selected + row.to(gl.int64) * TOPK
    first_key, end_key = part_of(seen if TOPK == 0 else TOPK, part % num_splits, num_splits, BT)
    q_latent, q_rotary, k_latent, k_rotary, weights = buffers(BH, BT, C, R)
    key = gl.arange(0, BT, layout=gl.SliceLayout(1, KEYS))
    position = positions(chosen, first_key + key, end_key, seen, TOPK)
    page = pages_of(pages, position, PAGE)
    _copy_keys(k_latent, k_rotary, 0, pool, position, page, C, R, PAGE, KEYS)
    position = positions(chosen, first_key + BT + key, end_key, seen, TOPK)
    load_queries(queries, row, first_head, q_latent, q_rotary, H, C, R, BH, KEYS)
    page = pages_of(pages, position, PAGE)
    if TOPK > 0:
        end_key = gl.minimum(end_key, reach(chosen, seen, TOPK, TOPK_PADDED))

    largest = gl.full([BH], -1e30, gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([BH, BT], gl.float32, SCORES)
    acc = gl.zeros([BH, C], gl.float32, VALUES)
    column = gl.arange(0, BT, layout=gl.SliceLayout(0, SCORES))
    for first in range(first_key, end_key, BT):
        is_key = positions(chosen, first + column, end_key, seen, TOPK) >= 0
        copy.wait_group(0)
        hopper.fence_async_shared()
        # Keys of this step are here for all, and all are done with those of the one before.
        barrier()
        stage = (first - first_key) // BT % 2
        latents, rotaries = k_latent.index(stage), k_rotary.index(stage)
        _copy_keys(k_latent, k_rotary, 1 - stage, pool, position, page, C, R, PAGE, KEYS)
        position = positions(chosen, first + 2 * BT + key, end_key, seen, TOPK)
        scores = score_tile(q_latent, q_rotary, latents, rotaries, BH, BT, SCORES)
        scores = gl.where(is_key.expand_dims(0), scores * factor, -float("inf"))
        largest, total, shrink = fold(scores, largest, total, weights)
        page = pages_of(pages, position, PAGE)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, VALUES)).expand_dims(1)
        barrier()
        acc = hopper.warpgroup_mma(weights, latents, acc, is_async=True)
        # Not in the next step: ptxas would then wait for each single product.
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
    copy.wait_group(0)
    finish(
        acc, total, largest, q_latent, out, log_sums, row, part, first_head,
        first_key < end_key, H, C, BH, IS_SPLIT, KEYS, SCORES, VALUES,
    )  # fmt: skip


def attend(
    queries: Tensor,
    pool: Tensor,
    ragged: Ragged,
    selected: Tensor | None,
    scale: float,
    latent_rank: int,
    num_splits: int,
) -> Tensor:
    """Launch a kernel for keys as these are, and for parts the one that adds them up."""
    num_rows, num_heads, width = queries.shape
    num_sequences = len(ragged.page_table)
    topk = 0 if selected is None else selected.shape[1]
    out, parts, log_sums = portable.outputs(queries, latent_rank, num_splits)
    assert pool.is_contiguous()
    kernel = attend_fp8_kernel if pool.dtype == torch.uint8 else attend_kernel
    kernel[(num_rows * num_splits * cdiv(num_heads, WIDE.heads),)](
        queries.contiguous(),
        pool,
        pool if selected is None else selected.contiguous(),
        ragged.query_start,
        ragged.kv_lens,
        ragged.page_table,
        parts,
        log_sums,
        scale * math.log2(math.e),
        ragged.page_stride,
        num_sequences,
        num_splits,
        H=num_heads,
        C=latent_rank,
        R=width - latent_rank,
        TOPK=topk,
        ONE_EACH=num_sequences == num_rows,
        IS_SPLIT=num_splits > 1,
        TOPK_PADDED=next_power_of_2(topk),
        BH=WIDE.heads,
        BT=WIDE.keys,
        PAGE=PAGE_TOKENS,
        num_warps=WARPS,
        **chain.options(),
    )
    if num_splits > 1:
        portable.combine(parts, log_sums, out)
    return out


def run(
    queries: Tensor,
    pool: Tensor,
    ragged: Ragged,
    selected: Tensor | None,
    scale: float,
    latent_rank: int,
) -> Tensor:
    """As `triton.run`, which computes what is not as wide, or of too few heads, here."""
    _, num_heads, width = queries.shape
    is_made_for = (latent_rank, width) == (LATENT, LATENT + ROTARY)
    if queries.dtype != torch.bfloat16 or not is_made_for or num_heads < FEWEST_HEADS:
        return portable.run(queries, pool, ragged, selected, scale, latent_rank)
    splits = portable.splits_of(WIDE, queries, ragged, selected)
    return attend(queries, pool, ragged, selected, scale, latent_rank, splits)


BACKEND = Backend("gluon", run, why_not)
