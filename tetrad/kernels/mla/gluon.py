"""Warp-specialized latent attention on Hopper: the tensor cores have work while other warps wait
for memory or compute the softmax.

Four warpgroups: `_copy`, the producer, fills two buffers with tiles of keys; `_score` turns one
tile after the other into softmax weights; two run `_values`, each summing half of the value
columns. Weights reuse the memory of their tile's rotary keys, which scoring needs last.

    _copy     keys 0 ▶ │ keys 1 ▶ │                 │ keys 2 ▶
    _score             │ scores 0, weights 0 ▶ │ scores 1, weights 1 ▶ │ scores 2 …
    _values                                    │ values 0 ▶ │          │ values 1 ▶
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tetrad.core.step import PAGE_TOKENS
from tetrad.kernels import chain
from tetrad.kernels.backend import Backend
from tetrad.kernels.experts.gluon import why_not
from tetrad.kernels.experts.gluon_parts import (
    barrier,
    copy,
    gl,
    hopper,
    jit,
    mbarrier,
    start_copy,
)
from tetrad.kernels.mla import triton as portable
from tetrad.kernels.mla.gluon_fp8 import decode_keys
from tetrad.kernels.mla.gluon_parts import (
    pages_of,
    part_of,
    place,
    positions,
    reach,
    same_bits,
    seen_by,
    slots_of,
    store,
)
from tetrad.kernels.mla.tiles import WIDE
from tetrad.kernels.ragged import Ragged
from tetrad.kernels.triton_support import cdiv, constexpr, next_power_of_2

LATENT, ROTARY = 512, 64
"""Widths of the keys that it is written for."""
FEWEST_HEADS = 17
"""Fewer fill a tile of `triton.py`, which leaves less of its products empty. Decodes of as few as
these are bound by the bytes of keys, however full the products."""
GROUP_WARPS = 4
WARPS = constexpr(GROUP_WARPS)
REGISTERS, FP8_REGISTERS = constexpr((120, 168, 168)), constexpr((88, 160, 160))
"""Per thread, of `_score` and of each `_values`; `_copy` gets what is left of 512, 56 or 104."""


@jit()
def _start_columns(target, key, first_column, is_key, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Start the copy of columns of rows; zeros where there is none."""
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT)).expand_dims(0)
    start_copy(target, key + first_column + column, mask=is_key & (column < WIDTH))


@jit()
def _copy_keys(
    slot, entry, pool, chosen, pages, seen, end_key, num_tiles, keys, here, free,
    C: gl.constexpr, R: gl.constexpr, TOPK: gl.constexpr, BT: gl.constexpr, PAGE: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Tiles of keys as buffers become free. `slot`: of the first, from `entry` on."""
    HALF: gl.constexpr = C // 2
    for tile in range(num_tiles):
        stage = tile % 2
        key = (pool + slot.to(gl.int64) * (C + R)).expand_dims(1)
        is_key = (slot >= 0).expand_dims(1)
        entry += BT
        position = positions(chosen, entry, end_key, seen, TOPK)
        mbarrier.wait(free.index(stage), (tile // 2 + 1) % 2, pred=tile > 1)
        _start_columns(keys[0].index(stage), key, 0, is_key, HALF, LAYOUT)
        copy.mbarrier_arrive(here.index(stage), increment_count=False)
        _start_columns(keys[1].index(stage), key, HALF, is_key, HALF, LAYOUT)
        _start_columns(keys[2].index(stage), key, C, is_key, R, LAYOUT)
        copy.mbarrier_arrive(here.index(2 + stage), increment_count=False)
        page = pages_of(pages, position, PAGE)
        slot = slots_of(position, page, PAGE)


@jit()
def _copy(
    slot, entry, queries, pool, chosen, pages, seen, end_key, num_tiles, row, first_head, q, keys,
    here, free,
    H: gl.constexpr, C: gl.constexpr, R: gl.constexpr, TOPK: gl.constexpr, BH: gl.constexpr,
    BT: gl.constexpr, PAGE: gl.constexpr, IS_FP8: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Queries, then keys, which `LAYOUT` deals out by rows."""
    HALF: gl.constexpr = C // 2
    if num_tiles > 0:
        head = first_head + gl.arange(0, BH, layout=gl.SliceLayout(1, LAYOUT))
        query = queries + (row.to(gl.int64) * H + head).expand_dims(1) * (C + R)
        is_head = (head < H).expand_dims(1)
        _start_columns(q[0], query, 0, is_head, HALF, LAYOUT)
        _start_columns(q[1], query, HALF, is_head, HALF, LAYOUT)
        _start_columns(q[2], query, C, is_head, R, LAYOUT)
        if IS_FP8:
            copy.commit_group()
            decode_keys(
                slot, entry, pool, chosen, pages, seen, end_key, num_tiles, keys, here, free,
                C, R, TOPK, BT, PAGE, LAYOUT,
            )  # fmt: skip
        else:
            _copy_keys(
                slot, entry, pool, chosen, pages, seen, end_key, num_tiles, keys, here, free,
                C, R, TOPK, BT, PAGE, LAYOUT,
            )  # fmt: skip


@jit()
def _score(
    chosen, seen, first_key, end_key, num_tiles, factor, q, keys, notes, here, said, log_sums,
    part, first_head,
    H: gl.constexpr, TOPK: gl.constexpr, IS_SPLIT: gl.constexpr, BH: gl.constexpr,
    BT: gl.constexpr,
):  # fmt: skip
    """The online softmax: weights of each tile, and what sums before it are multiplied with; at
    last what all are."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    HEADS: gl.constexpr = gl.SliceLayout(1, SCORES)
    largest = gl.full([BH], -1e30, gl.float32, HEADS)
    total = gl.zeros([BH], gl.float32, HEADS)
    entry = first_key + gl.arange(0, BT, layout=gl.SliceLayout(0, SCORES))
    for tile in range(num_tiles):
        stage, phase = tile % 2, tile // 2 % 2
        is_key = positions(chosen, entry, end_key, seen, TOPK) >= 0
        entry += BT
        scores = gl.zeros([BH, BT], gl.float32, SCORES)
        mbarrier.wait(here.index(stage), phase)
        hopper.fence_async_shared()
        left, right = keys[0].index(stage), keys[1].index(stage)
        rotary = keys[2].index(stage)
        scores = hopper.warpgroup_mma(q[0], left.permute([1, 0]), scores, is_async=True)
        mbarrier.wait(here.index(2 + stage), phase)
        hopper.fence_async_shared()
        scores = hopper.warpgroup_mma(q[1], right.permute([1, 0]), scores, is_async=True)
        scores = hopper.warpgroup_mma(q[2], rotary.permute([1, 0]), scores, is_async=True)
        scores = hopper.warpgroup_mma_wait(0, deps=[scores])
        scores = gl.where(is_key.expand_dims(0), scores * factor, -float("inf"))
        raised = gl.maximum(largest, gl.max(scores, 1))
        shares = gl.exp2(scores - raised.expand_dims(1))
        shrink = gl.exp2(largest - raised)
        rotary.store(shares.to(gl.bfloat16))
        notes.index(stage).store(shrink)
        hopper.fence_async_shared()
        mbarrier.arrive(said.index(stage), count=1)
        total = total * shrink + gl.sum(shares, 1)
        largest = raised
    chain.before_next()
    is_empty = total == 0.0
    total = gl.where(is_empty, 1.0, total)
    notes.index(2).store(1.0 / total)
    mbarrier.arrive(said.index(2), count=1)
    if IS_SPLIT:
        head = first_head + gl.arange(0, BH, layout=HEADS)
        log_sum = gl.where(is_empty, -float("inf"), largest + gl.log2(total))
        gl.store(log_sums + part.to(gl.int64) * H + head, log_sum, mask=head < H)


@jit()
def _values(
    values, weights, notes, staging, said, free, num_tiles, out, row, part, first_head,
    first_column,
    H: gl.constexpr, C: gl.constexpr, IS_SPLIT: gl.constexpr, BH: gl.constexpr,
):  # fmt: skip
    """Sums of half the columns; a row that reads nothing gives zeros. Parts are fp16, which rounds
    less than the result; what is too large for it becomes infinite, and is noticed."""
    NUMBER: gl.constexpr = gl.float16 if IS_SPLIT else gl.bfloat16
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C // 4, 16])
    HEADS: gl.constexpr = gl.SliceLayout(1, VALUES)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    acc = gl.zeros([BH, C // 2], gl.float32, VALUES)
    for tile in range(num_tiles):
        stage = tile % 2
        mbarrier.wait(said.index(stage), tile // 2 % 2)
        hopper.fence_async_shared()
        acc = acc * notes.index(stage).load(HEADS).expand_dims(1)
        acc = hopper.warpgroup_mma(weights.index(stage), values.index(stage), acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free.index(stage), count=1)
    mbarrier.wait(said.index(2), 0)
    acc = acc * notes.index(2).load(HEADS).expand_dims(1)
    # Through shared memory, to write 16 bytes at a time: nobody needs the queries any more.
    staging.store(same_bits(acc.to(NUMBER), gl.bfloat16))
    barrier()
    half = same_bits(staging.load(ROWS), NUMBER)
    if IS_SPLIT:
        if num_tiles > 0:
            store(out, part, first_head, first_column, half, H, C, C // 2, BH, ROWS)
    else:
        store(out, row, first_head, first_column, half, H, C, C // 2, BH, ROWS)


@jit()
def _bars(NUMBER: gl.constexpr, count: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(NUMBER):
        mbarrier.init(bars.index(index), count=count)
    return bars


@jit()
def _buffers(BH: gl.constexpr, BT: gl.constexpr, C: gl.constexpr, R: gl.constexpr):
    """Queries and two tiles of keys as wgmma reads them: left and right half of the latents, and
    rotary numbers. A number for each head, three times: what sums are multiplied with."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    NOTE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries = (
        gl.allocate_shared_memory(gl.bfloat16, [BH, C // 2], SHARED),
        gl.allocate_shared_memory(gl.bfloat16, [BH, C // 2], SHARED),
        gl.allocate_shared_memory(gl.bfloat16, [BH, R], SHARED),
    )
    keys = (
        gl.allocate_shared_memory(gl.bfloat16, [2, BT, C // 2], SHARED),
        gl.allocate_shared_memory(gl.bfloat16, [2, BT, C // 2], SHARED),
        gl.allocate_shared_memory(gl.bfloat16, [2, BT, R], SHARED),
    )
    return queries, keys, gl.allocate_shared_memory(gl.float32, [3, BH], NOTE)


@jit(
    do_not_specialize=["page_stride", "num_sequences", "num_splits"],
    do_not_specialize_on_alignment=["query_start", "kv_lens", "page_table"],
)
def attend_kernel(
    queries, pool, selected, query_start, kv_lens, page_table, out, log_sums, factor,
    page_stride, num_sequences, num_splits,
    H: gl.constexpr, C: gl.constexpr, R: gl.constexpr, TOPK: gl.constexpr,
    ONE_EACH: gl.constexpr, IS_SPLIT: gl.constexpr, TOPK_PADDED: gl.constexpr,
    BH: gl.constexpr, BT: gl.constexpr, PAGE: gl.constexpr, IS_FP8: gl.constexpr,
):  # fmt: skip
    """As `triton.attend_kernel`; scores times `factor` are in powers of two."""
    COPIED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    # Left and right halves of both buffers are filled; both sums have read a buffer; a buffer's
    # weights are there, and in the end what sums are multiplied with.
    here, free, said = _bars(4, 1 if IS_FP8 else 32 * WARPS), _bars(2, 2), _bars(3, 1)
    q, keys, notes = _buffers(BH, BT, C, R)
    first_head, row, part = place(num_splits, H, BH)
    seen, pages = seen_by(
        row, query_start, kv_lens, page_table, page_stride, num_sequences, ONE_EACH
    )
    chosen = selected + row.to(gl.int64) * TOPK
    first_key, end_key = part_of(seen if TOPK == 0 else TOPK, part % num_splits, num_splits, BT)
    if TOPK > 0 and seen < TOPK:
        end_key = gl.minimum(end_key, reach(chosen, seen, TOPK, TOPK_PADDED))
    num_tiles = gl.maximum(gl.cdiv(end_key - first_key, BT), 0)
    entry = first_key + gl.arange(0, BT, layout=gl.SliceLayout(1, COPIED))
    position = positions(chosen, entry, end_key, seen, TOPK)
    slot = slots_of(position, pages_of(pages, position, PAGE), PAGE)
    gl.warp_specialize(
        [
            (
                _copy,
                (
                    slot, entry, queries, pool, chosen, pages, seen, end_key, num_tiles, row,
                    first_head, q, keys, here, free, H, C, R, TOPK, BH, BT, PAGE, IS_FP8, COPIED,
                ),
            ),
            (
                _score,
                (
                    chosen, seen, first_key, end_key, num_tiles, factor, q, keys, notes, here, said,
                    log_sums, part, first_head, H, TOPK, IS_SPLIT, BH, BT,
                ),
            ),
            (
                _values,
                (
                    keys[0], keys[2], notes, q[0], said, free, num_tiles, out, row, part,
                    first_head, 0, H, C, IS_SPLIT, BH,
                ),
            ),
            (
                _values,
                (
                    keys[1], keys[2], notes, q[1], said, free, num_tiles, out, row, part,
                    first_head, C // 2, H, C, IS_SPLIT, BH,
                ),
            ),
        ],
        [WARPS, WARPS, WARPS],
        FP8_REGISTERS if IS_FP8 else REGISTERS,
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
    out, parts, log_sums = portable.outputs(queries, latent_rank, num_splits, torch.float16)
    assert pool.is_contiguous()
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
        IS_FP8=pool.dtype == torch.uint8,
        num_warps=GROUP_WARPS,
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
