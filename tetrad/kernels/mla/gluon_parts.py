"""Pieces of the Hopper kernel of latent attention: which part is whose, where keys lie, the end."""

from __future__ import annotations

from tetrad.kernels import chain
from tetrad.kernels.experts.gluon_parts import gl, jit


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
    """int32 numbers of the slots in the pool where keys at some positions lie, -1 for no key."""
    return gl.where(position >= 0, page * PAGE + position % PAGE, -1)


@jit()
def part_of(num_entries, split, num_splits, BT: gl.constexpr):
    """First entry of a part, and the one behind its last."""
    each = gl.cdiv(gl.cdiv(num_entries, BT), num_splits) * BT
    return split * each, gl.minimum(split * each + each, num_entries)


@jit()
def same_bits(values, KIND: gl.constexpr):
    """As numbers of another type with as many bits."""
    return values.to(KIND, bitcast=True)


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
