"""Latent attention on Hopper for FP8 keys: their codes wait in registers, and are decoded under the
last product.

Both warpgroups compute half of the scores each, exchange weights through shared memory, and sum
half of the values each. Codes of a tile of keys are asked for under the first product of the tile
before, which hides their way from memory. While the tensor cores sum the values of that tile, the
codes become bf16 and go to the other buffer in shared memory.
"""

from __future__ import annotations

from tetrad.kernels.e4m3 import BLOCK, SCALED_PTX
from tetrad.kernels.experts.gluon_parts import barrier, copy, gl, hopper, jit, start_copy
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
    seen_by,
    slots_of,
    start_scores,
)

WARPS = 8


@jit()
def decode(codes, scales):
    """bf16 numbers of e4m3 codes; `scales` are powers of two."""
    codes, scales = gl.broadcast(codes, scales.to(gl.bfloat16).expand_dims(2))
    return gl.inline_asm_elementwise(
        SCALED_PTX, "=r,=r,r,r,r", [codes, scales], dtype=gl.bfloat16, is_pure=True, pack=4
    )


@jit()
def _load_codes(
    rotaries, pool, position, page,
    C: gl.constexpr, R: gl.constexpr, PAGE: gl.constexpr,
    CODES: gl.constexpr, ROTARIES: gl.constexpr,
):  # fmt: skip
    """Codes [key, group, column] and scales [key, group] of a tile; starts the copy of its rotary
    keys. Zeros where there is no key, whatever the pool has there."""
    GROUPS: gl.constexpr = C // BLOCK
    BEHIND: gl.constexpr = C + GROUPS * 4
    slot = slots_of(position, page, PAGE)
    near = gl.convert_layout(slot, gl.SliceLayout(1, gl.SliceLayout(2, CODES)), assert_trivial=True)
    group = gl.arange(0, GROUPS, layout=gl.SliceLayout(0, gl.SliceLayout(2, CODES)))
    group = group.expand_dims(0)
    is_key = (near >= 0).expand_dims(1) & (group >= 0)
    key = (pool + near * (BEHIND + 2 * R)).expand_dims(1)
    scales = gl.load((key + C).to(gl.pointer_type(gl.float32)) + group, mask=is_key, other=0.0)
    column = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(1, CODES)))
    column = column.expand_dims(0).expand_dims(1)
    at = (key + group * BLOCK).expand_dims(2) + column
    codes = gl.load(at, mask=is_key.expand_dims(2) & (column >= 0), other=0)
    rotary = (pool + slot * (BEHIND + 2 * R) + BEHIND).expand_dims(1)
    column = gl.arange(0, R, layout=gl.SliceLayout(0, ROTARIES)).expand_dims(0)
    is_key = (slot >= 0).expand_dims(1) & (column >= 0)
    start_copy(rotaries, rotary.to(gl.pointer_type(gl.bfloat16)) + column, mask=is_key)
    copy.commit_group()
    return codes, scales


@jit()
def _store_keys(latents, codes, scales, BT: gl.constexpr, C: gl.constexpr):
    """Decode a tile to where wgmma reads it; its rotary keys are there too then."""
    latents.store(decode(codes, scales).reshape([BT, C]))
    copy.wait_group(0)
    hopper.fence_async_shared()


@jit(
    do_not_specialize=["page_stride", "num_sequences", "num_splits"],
    do_not_specialize_on_alignment=["query_start", "kv_lens", "page_table"],
)
def attend_fp8_kernel(
    queries, pool, selected, query_start, kv_lens, page_table, out, log_sums, factor,
    page_stride, num_sequences, num_splits,
    H: gl.constexpr, C: gl.constexpr, R: gl.constexpr, TOPK: gl.constexpr,
    ONE_EACH: gl.constexpr, IS_SPLIT: gl.constexpr, TOPK_PADDED: gl.constexpr,
    BH: gl.constexpr, BT: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """As `gluon.attend_kernel`."""
    KEYS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    CODES: gl.constexpr = gl.BlockedLayout([1, 1, 16], [4, 1, 8], [8, 1, 1], [2, 1, 0])
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
    codes, scales = _load_codes(k_rotary.index(0), pool, position, page, C, R, PAGE, CODES, KEYS)
    position = positions(chosen, first_key + BT + key, end_key, seen, TOPK)
    load_queries(queries, row, first_head, q_latent, q_rotary, H, C, R, BH, KEYS)
    page = pages_of(pages, position, PAGE)
    if TOPK > 0:
        end_key = gl.minimum(end_key, reach(chosen, seen, TOPK, TOPK_PADDED))
    _store_keys(k_latent.index(0), codes, scales, BT, C)

    largest = gl.full([BH], -1e30, gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([BH, BT], gl.float32, SCORES)
    acc = gl.zeros([BH, C], gl.float32, VALUES)
    column = gl.arange(0, BT, layout=gl.SliceLayout(0, SCORES))
    for first in range(first_key, end_key, BT):
        # Keys of this step are here for all, and all are done with those of the one before.
        barrier()
        stage = (first - first_key) // BT % 2
        latents, rotaries = k_latent.index(stage), k_rotary.index(stage)
        scores = start_scores(q_latent, q_rotary, latents, rotaries, BH, BT, SCORES)
        codes, scales = _load_codes(
            k_rotary.index(1 - stage), pool, position, page, C, R, PAGE, CODES, KEYS
        )
        position = positions(chosen, first + 2 * BT + key, end_key, seen, TOPK)
        is_key = positions(chosen, first + column, end_key, seen, TOPK) >= 0
        scores = gl.where(
            is_key.expand_dims(0),
            hopper.warpgroup_mma_wait(0, deps=[scores]) * factor,
            -float("inf"),
        )
        largest, total, shrink = fold(scores, largest, total, weights)
        page = pages_of(pages, position, PAGE)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, VALUES)).expand_dims(1)
        barrier()
        acc = hopper.warpgroup_mma(weights, latents, acc, is_async=True)
        _store_keys(k_latent.index(1 - stage), codes, scales, BT, C)
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
    finish(
        acc, total, largest, q_latent, out, log_sums, row, part, first_head,
        first_key < end_key, H, C, BH, IS_SPLIT, KEYS, SCORES, VALUES,
    )  # fmt: skip
