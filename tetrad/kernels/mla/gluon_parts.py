"""Pieces of the Hopper kernels of latent attention: who does what, scores, sums, the end."""

from __future__ import annotations

from tetrad.kernels import chain
from tetrad.kernels.experts.gluon_parts import barrier, gl, hopper, jit


@jit()
def place(num_splits, H: gl.constexpr, BH: gl.constexpr):
    """First head, row, and part of all rows' parts, of a program; heads of a part stand side by
    side, to meet in the L2 cache."""
    HEAD_TILES: gl.constexpr = (H + BH - 1) // BH
    part = gl.program_id(0) // HEAD_TILES
    return gl.program_id(0) % HEAD_TILES * BH, part // num_splits, part


@jit()
def seen_by(
    row, query_start, kv_lens, page_table, page_stride, num_sequences, ONE_EACH: gl.constexpr
):
    """How many keys a row sees, and where its pages stand. The first to touch memory."""
    chain.after_previous()
    sequence = row
    if not ONE_EACH:
        VECTOR: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
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
def reach(chosen, seen, TOPK: gl.constexpr, TOPK_PADDED: gl.constexpr):
    """Entries of a selection up to the last that names a key. It also brings the selection near,
    before the loop asks for it a tile at a time."""
    VECTOR: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    entry = gl.arange(0, TOPK_PADDED, layout=VECTOR)
    position = gl.load(chosen + entry, mask=entry < TOPK, other=-1)
    return gl.max(gl.where((position >= 0) & (position < seen), entry + 1, 0), 0)


@jit()
def positions(chosen, entry, end, seen, TOPK: gl.constexpr):
    """Positions of the keys that a row's entries name, -1 for none."""
    position = gl.where(entry < end, entry, -1)
    if TOPK > 0:
        position = gl.load(chosen + entry, mask=entry < end, other=-1)
        position = gl.where(position < seen, position, -1)
    return position


@jit()
def pages_of(pages, position, PAGE: gl.constexpr):
    return gl.load(pages + position // PAGE, mask=position >= 0, other=0)


@jit()
def slots_of(position, page, PAGE: gl.constexpr):
    """Where the keys at some positions lie in the pool, -1 where there is none."""
    return gl.where(position >= 0, page.to(gl.int64) * PAGE + position % PAGE, -1)


@jit()
def load_queries(
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
def start_scores(
    q_latent, q_rotary, k_latent, k_rotary,
    BH: gl.constexpr, BT: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """fp32 [head, key], to be waited for."""
    scores = gl.zeros([BH, BT], gl.float32, LAYOUT)
    scores = hopper.warpgroup_mma(q_latent, k_latent.permute([1, 0]), scores, is_async=True)
    return hopper.warpgroup_mma(q_rotary, k_rotary.permute([1, 0]), scores, is_async=True)


@jit()
def fold(scores, largest, total, weights):
    """One step of the online softmax. Writes the bf16 weights of the step; returns the new largest
    scores and sums, and what sums so far are multiplied with."""
    raised = gl.maximum(largest, gl.max(scores, 1))
    shares = gl.exp2(scores - raised.expand_dims(1))
    weights.store(shares.to(gl.bfloat16))
    hopper.fence_async_shared()
    shrink = gl.exp2(largest - raised)
    return raised, total * shrink.expand_dims(1) + shares, shrink


@jit()
def buffers(BH: gl.constexpr, BT: gl.constexpr, C: gl.constexpr, R: gl.constexpr):
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
def part_of(num_entries, split, num_splits, BT: gl.constexpr):
    """First entry of a part, and the one behind its last."""
    each = gl.cdiv(gl.cdiv(num_entries, BT), num_splits) * BT
    return split * each, gl.minimum(split * each + each, num_entries)


@jit()
def finish(
    acc, total, largest, staging, out, log_sums, row, part, first_head, has_keys,
    H: gl.constexpr, C: gl.constexpr, BH: gl.constexpr, IS_SPLIT: gl.constexpr, KEYS: gl.constexpr,
    SCORES: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """Divide by the sums and write; a row that reads nothing gives zeros."""
    chain.before_next()
    total = gl.sum(total, 1)
    is_empty = total == 0.0
    total = gl.where(is_empty, 1.0, total)
    acc = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, VALUES)).expand_dims(1)
    if IS_SPLIT:
        head = first_head + gl.arange(0, BH, layout=gl.SliceLayout(1, SCORES))
        log_sum = gl.where(is_empty, -float("inf"), largest + gl.log2(total))
        gl.store(log_sums + part.to(gl.int64) * H + head, log_sum, mask=head < H)
        if has_keys:
            store(out, part, first_head, 0, acc, H, C, C, BH, VALUES)
    else:
        # Through shared memory, to write 16 bytes at a time: nobody needs the queries any more.
        barrier()
        staging.store(acc.to(gl.bfloat16))
        barrier()
        store(out, row, first_head, 0, staging.load(KEYS), H, C, C, BH, KEYS)


@jit()
def store(
    out, row, first_head, first_column, values,
    H: gl.constexpr, C: gl.constexpr, COLUMNS: gl.constexpr, BH: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Write COLUMNS of a row's C columns from the first on."""
    head = first_head + gl.arange(0, BH, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT)).expand_dims(0)
    at = out + (row.to(gl.int64) * H + head).expand_dims(1) * C + first_column
    gl.store(at + column, values, mask=(head < H).expand_dims(1) & (column < COLUMNS))
