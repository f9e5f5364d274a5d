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
from tetrad.kernels.backend import Backend
from tetrad.kernels.experts.gluon import why_not
from tetrad.kernels.experts.gluon_parts import barrier, copy, gl, hopper, jit, start_copy
from tetrad.kernels.mla import triton as portable
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
def _place(num_splits, H: gl.constexpr, BH: gl.constexpr):
    """First head, row, and part of all rows' parts, of a program; heads of a part stand side by
    side, to meet in the L2 cache."""
    HEAD_TILES: gl.constexpr = (H + BH - 1) // BH
    part = gl.program_id(0) // HEAD_TILES
    return gl.program_id(0) % HEAD_TILES * BH, part // num_splits, part


@jit()
def _seen_by(
    row, query_start, kv_lens, page_table, page_stride, num_sequences, ONE_EACH: gl.constexpr
):
    """How many keys a row sees, and where its pages stand."""
    sequence = row
    if not ONE_EACH:
        VECTOR: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
        sequence = 0
        for first in range(0, num_sequences, 256):
            other = first + gl.arange(0, 256, layout=VECTOR)
            known = other < num_sequences
            end = gl.load(query_start + 1 + other, mask=known, other=0)
            sequence += gl.sum((known & (end <= row)).to(gl.int32), 0)
    is_owned = sequence < num_sequences
    kv_len = gl.load(kv_lens + sequence, mask=is_owned, other=0)
    end = gl.load(query_start + sequence + 1, mask=is_owned, other=0)
    seen = gl.where(kv_len > 0, kv_len - end + row + 1, 0)
    return seen, page_table + sequence.to(gl.int64) * page_stride


@jit()
def _reach(chosen, seen, TOPK: gl.constexpr, TOPK_PADDED: gl.constexpr):
    """Entries of a selection up to the last that names a key. It also brings the selection near,
    before the loop asks for it a tile at a time."""
    VECTOR: gl.constexpr = gl.BlockedLayout([4], [32], [8], [0])
    entry = gl.arange(0, TOPK_PADDED, layout=VECTOR)
    position = gl.load(chosen + entry, mask=entry < TOPK, other=-1)
    return gl.max(gl.where((position >= 0) & (position < seen), entry + 1, 0), 0)


@jit()
def _positions(chosen, entry, end, seen, TOPK: gl.constexpr):
    """Positions of the keys that a row's entries name, -1 for none."""
    position = gl.where(entry < end, entry, -1)
    if TOPK > 0:
        position = gl.load(chosen + entry, mask=entry < end, other=-1)
        position = gl.where(position < seen, position, -1)
    return position


@jit()
def _pages(pages, position, PAGE: gl.constexpr):
    return gl.load(pages + position // PAGE, mask=position >= 0, other=0)


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


@jit()
def _load_queries(
    queries, row, first_head, latents, rotaries,
    H: gl.constexpr, C: gl.constexpr, R: gl.constexpr, BH: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    head = first_head + gl.arange(0, BH, layout=gl.SliceLayout(1, LAYOUT))
    query = queries + (row.to(gl.int64) * H + head).expand_dims(1) * (C + R)
    is_head = (head < H).expand_dims(1)
    column = gl.arange(0, C, layout=gl.SliceLayout(0, LAYOUT)).expand_dims(0)
    latents.store(gl.load(query + column, mask=is_head & (column < C), other=0.0))
    column = gl.arange(0, R, layout=gl.SliceLayout(0, LAYOUT)).expand_dims(0)
    rotaries.store(gl.load(query + C + column, mask=is_head & (column < R), other=0.0))


@jit()
def _scores(
    q_latent, q_rotary, k_latent, k_rotary,
    BH: gl.constexpr, BT: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """fp32 [head, key]."""
    scores = gl.zeros([BH, BT], gl.float32, LAYOUT)
    scores = hopper.warpgroup_mma(q_latent, k_latent.permute([1, 0]), scores, is_async=True)
    scores = hopper.warpgroup_mma(q_rotary, k_rotary.permute([1, 0]), scores, is_async=True)
    return hopper.warpgroup_mma_wait(0, deps=[scores])


@jit()
def _fold(scores, largest, total, weights):
    """One step of the online softmax. Writes the bf16 weights of the step; returns the new largest
    scores and sums, and what sums so far are multiplied with."""
    raised = gl.maximum(largest, gl.max(scores, 1))
    shares = gl.exp2(scores - raised.expand_dims(1))
    weights.store(shares.to(gl.bfloat16))
    hopper.fence_async_shared()
    shrink = gl.exp2(largest - raised)
    return raised, total * shrink.expand_dims(1) + shares, shrink


@jit()
def _buffers(BH: gl.constexpr, BT: gl.constexpr, C: gl.constexpr, R: gl.constexpr):
    """Shared memory, as wgmma reads it: queries, two tiles of keys, weights."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    return (
        gl.allocate_shared_memory(gl.bfloat16, [BH, C], SHARED),
        gl.allocate_shared_memory(gl.bfloat16, [BH, R], SHARED),
        gl.allocate_shared_memory(gl.bfloat16, [2, BT, C], SHARED),
        gl.allocate_shared_memory(gl.bfloat16, [2, BT, R], SHARED),
        gl.allocate_shared_memory(gl.bfloat16, [BH, BT], SHARED),
    )


@jit()
def _part_of(num_entries, split, num_splits, BT: gl.constexpr):
    """First entry of a part, and the one behind its last."""
    each = gl.cdiv(gl.cdiv(num_entries, BT), num_splits) * BT
    return split * each, gl.minimum(split * each + each, num_entries)


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
    first_head, row, part = _place(num_splits, H, BH)
    seen, pages = _seen_by(
        row, query_start, kv_lens, page_table, page_stride, num_sequences, ONE_EACH
    )
    chosen = selected + row.to(gl.int64) * TOPK
    first_key, end_key = _part_of(seen if TOPK == 0 else TOPK, part % num_splits, num_splits, BT)
    q_latent, q_rotary, k_latent, k_rotary, weights = _buffers(BH, BT, C, R)
    key = gl.arange(0, BT, layout=gl.SliceLayout(1, KEYS))
    position = _positions(chosen, first_key + key, end_key, seen, TOPK)
    page = _pages(pages, position, PAGE)
    _copy_keys(k_latent, k_rotary, 0, pool, position, page, C, R, PAGE, KEYS)
    position = _positions(chosen, first_key + BT + key, end_key, seen, TOPK)
    _load_queries(queries, row, first_head, q_latent, q_rotary, H, C, R, BH, KEYS)
    page = _pages(pages, position, PAGE)
    if TOPK > 0:
        end_key = gl.minimum(end_key, _reach(chosen, seen, TOPK, TOPK_PADDED))

    largest = gl.full([BH], -1e30, gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([BH, BT], gl.float32, SCORES)
    acc = gl.zeros([BH, C], gl.float32, VALUES)
    column = gl.arange(0, BT, layout=gl.SliceLayout(0, SCORES))
    for first in range(first_key, end_key, BT):
        is_key = _positions(chosen, first + column, end_key, seen, TOPK) >= 0
        copy.wait_group(0)
        hopper.fence_async_shared()
        # Keys of this step are here for all, and all are done with those of the one before.
        barrier()
        stage = (first - first_key) // BT % 2
        latents, rotaries = k_latent.index(stage), k_rotary.index(stage)
        _copy_keys(k_latent, k_rotary, 1 - stage, pool, position, page, C, R, PAGE, KEYS)
        position = _positions(chosen, first + 2 * BT + key, end_key, seen, TOPK)
        scores = _scores(q_latent, q_rotary, latents, rotaries, BH, BT, SCORES)
        scores = gl.where(is_key.expand_dims(0), scores * factor, -float("inf"))
        largest, total, shrink = _fold(scores, largest, total, weights)
        page = _pages(pages, position, PAGE)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, VALUES)).expand_dims(1)
        barrier()
        acc = hopper.warpgroup_mma(weights, latents, acc, is_async=True)
        # Not in the next step: ptxas would then wait for each single product.
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
    copy.wait_group(0)
    _finish(
        acc, total, largest, q_latent, out, log_sums, row, part, first_head,
        first_key < end_key, H, C, BH, IS_SPLIT, KEYS, SCORES, VALUES,
    )  # fmt: skip


@jit()
def _finish(
    acc, total, largest, staging, out, log_sums, row, part, first_head, has_keys,
    H: gl.constexpr, C: gl.constexpr, BH: gl.constexpr, IS_SPLIT: gl.constexpr, KEYS: gl.constexpr,
    SCORES: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """Divide by the sums and write; a row that reads nothing gives zeros."""
    total = gl.sum(total, 1)
    is_empty = total == 0.0
    total = gl.where(is_empty, 1.0, total)
    acc = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, VALUES)).expand_dims(1)
    if IS_SPLIT:
        head = first_head + gl.arange(0, BH, layout=gl.SliceLayout(1, SCORES))
        log_sum = gl.where(is_empty, -float("inf"), largest + gl.log2(total))
        gl.store(log_sums + part.to(gl.int64) * H + head, log_sum, mask=head < H)
        if has_keys:
            _store(out, part, first_head, acc, H, C, BH, VALUES)
    else:
        # Through shared memory, to write 16 bytes at a time: nobody needs the queries any more.
        barrier()
        staging.store(acc.to(gl.bfloat16))
        barrier()
        _store(out, row, first_head, staging.load(KEYS), H, C, BH, KEYS)


@jit()
def _store(
    out, row, first_head, values,
    H: gl.constexpr, C: gl.constexpr, BH: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    head = first_head + gl.arange(0, BH, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, C, layout=gl.SliceLayout(0, LAYOUT)).expand_dims(0)
    at = out + (row.to(gl.int64) * H + head).expand_dims(1) * C
    gl.store(at + column, values, mask=(head < H).expand_dims(1) & (column < C))


def attend(
    queries: Tensor,
    pool: Tensor,
    ragged: Ragged,
    selected: Tensor | None,
    scale: float,
    latent_rank: int,
    num_splits: int,
) -> Tensor:
    """Launch `attend_kernel`, and for parts the kernel that adds them up."""
    num_rows, num_heads, width = queries.shape
    num_sequences = len(ragged.page_table)
    topk = 0 if selected is None else selected.shape[1]
    out, parts, log_sums = portable.outputs(queries, latent_rank, num_splits)
    assert pool.is_contiguous()
    assert ragged.page_table.stride(1) == 1
    attend_kernel[(num_rows * num_splits * cdiv(num_heads, WIDE.heads),)](
        queries.contiguous(),
        pool,
        pool if selected is None else selected.contiguous(),
        ragged.query_start,
        ragged.kv_lens,
        ragged.page_table,
        parts,
        log_sums,
        scale * math.log2(math.e),
        ragged.page_table.stride(0),
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
