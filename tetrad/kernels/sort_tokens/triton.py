"""Grouping slots in one launch: a program per expert counts all slots, then places its own.

Every program counts for itself where its tiles begin, so no program waits for another and nothing
depends on the order in which they run. The next slots are on their way while some are counted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.kernels import chain
from tetrad.kernels.backend import Backend
from tetrad.kernels.sort_tokens.contract import FEWEST_FILLED, max_tiles
from tetrad.kernels.triton_support import constexpr, jit, next_power_of_2, tl, why_not

SHAPES = ((256, 4), (2048, 8), (4096, 8))
"""(slots that a program reads at a time, its warps). The first that takes a step in one reading
serves; the last serves the rest, but for few experts."""
FEW_EXPERTS, FEW_EXPERTS_SHAPE = 64, (16384, 16)
"""With as many programs as that, larger steps are read in larger pieces. Measured on an H200: 12.5
µs for 2048 tokens and 32 experts (19.0 in pieces of 4096), 28.5 µs with 256 experts (30.5 in pieces
of 16384, and 56 in pieces of 4096 by 16 warps)."""

FILLED, FILLED_PARTS = constexpr(FEWEST_FILLED[0]), constexpr(FEWEST_FILLED[1])


@jit()
def _fill(where, begin, end, step, value, SPAN: tl.constexpr):
    """Store `value` from `begin` to `end`, in stretches of SPAN whose starts lie `step` apart."""
    for start in range(begin, end, step):
        at = start + tl.arange(0, SPAN)
        tl.store(where + at, value, mask=at < end)


@jit()
def _read(ids, start, num_tokens, SLOTS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """[CHUNK, WIDTH]: experts of the tokens from `start` on, -1 where there is no slot."""
    token = start + tl.arange(0, CHUNK)[:, None]
    slot = tl.arange(0, WIDTH)[None, :]
    is_there = (token < num_tokens) & (slot < SLOTS)
    return tl.load(ids + token * SLOTS + slot, mask=is_there, other=-1).to(tl.int32)


@jit()
def _tiles_of(counts, BLOCK: tl.constexpr, SMALL_BLOCK: tl.constexpr):
    """Tiles of an expert with so many slots, and slots of each tile but the last."""
    large = (counts + BLOCK - 1) // BLOCK
    is_large = counts * FILLED_PARTS >= large * (BLOCK * FILLED)
    tiles = tl.where(is_large, large, (counts + SMALL_BLOCK - 1) // SMALL_BLOCK)
    return tiles, tl.maximum(counts + tiles - 1, 0) // tl.maximum(tiles, 1)


@jit()
def _place(
    ids, mine, expert, each, num_tokens,
    SLOTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write an expert's slots to its tiles, which begin at `mine`."""
    slot_number = tl.arange(0, WIDTH)[None, :] + 1
    num_placed = 0
    chosen = _read(ids, 0, num_tokens, SLOTS, WIDTH, CHUNK)
    for start in range(0, num_tokens, CHUNK):
        ahead = _read(ids, start + CHUNK, num_tokens, SLOTS, WIDTH, CHUNK)
        # a token's experts differ, so at most one of its slots is ours
        found = tl.sum(tl.where(chosen == expert, slot_number, 0), axis=1)
        is_mine = (found > 0).to(tl.int32)
        rank = num_placed + tl.cumsum(is_mine, 0) - 1
        at = rank // each * BLOCK + rank % each
        slot = (start + tl.arange(0, CHUNK)) * SLOTS + found - 1
        tl.store(mine + at, slot, mask=is_mine != 0)
        num_placed += tl.sum(is_mine)
        chosen = ahead


@jit(do_not_specialize=["num_tokens", "most_tiles"])
def sort_kernel(
    ids,
    rows,
    num_tokens,
    most_tiles,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    SMALL_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Program e writes the tiles of expert e, and a share of what lies behind the last tile.

    The three results lie one after another from `rows` on. CHUNK tokens are read at a time, with
    SLOTS slots each; WIDTH is the power of two that holds these.
    """
    chain.after_previous()
    tile_expert = rows + most_tiles * BLOCK
    num_tiles = tile_expert + most_tiles
    expert = tl.program_id(0)
    counts = tl.zeros([NUM_BINS], tl.int32)
    chosen = _read(ids, 0, num_tokens, SLOTS, WIDTH, CHUNK)
    for start in range(0, num_tokens, CHUNK):
        ahead = _read(ids, start + CHUNK, num_tokens, SLOTS, WIDTH, CHUNK)
        flat = chosen.reshape([CHUNK * WIDTH])
        counts += tl.histogram(flat, NUM_BINS, mask=flat >= 0)
        chosen = ahead
    tiles, each_of = _tiles_of(counts, BLOCK, SMALL_BLOCK)
    bins = tl.arange(0, NUM_BINS)
    total = tl.sum(tiles)
    count = tl.sum(tl.where(bins == expert, counts, 0))
    num_mine, each = _tiles_of(count, BLOCK, SMALL_BLOCK)
    is_before = (each_of > each) | ((each_of == each) & (bins < expert))
    first = tl.sum(tl.where(is_before, tiles, 0))
    each = tl.maximum(each, 1)

    mine = rows + first * BLOCK
    _place(ids, mine, expert, each, num_tokens, SLOTS, WIDTH, BLOCK, CHUNK)
    for start in range(0, num_mine * BLOCK, SPAN):
        at = start + tl.arange(0, SPAN)
        rank = at // BLOCK * each + at % BLOCK
        is_padding = (at % BLOCK >= each) | (rank >= count)
        tl.store(mine + at, -1, mask=is_padding & (at < num_mine * BLOCK))
    _fill(tile_expert, first, first + num_mine, SPAN, expert, SPAN)

    stride = NUM_EXPERTS * SPAN
    _fill(rows, total * BLOCK + expert * SPAN, most_tiles * BLOCK, stride, -1, SPAN)
    _fill(tile_expert, total + expert * SPAN, most_tiles, stride, -1, SPAN)
    chain.before_next()
    if expert == 0:
        tl.store(num_tiles, tl.sum(tl.where(each_of > SMALL_BLOCK, tiles, 0)))
        tl.store(num_tiles + 1, total)


def run(
    ids: Tensor, num_experts: int, block: int, small_block: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`ids` must be contiguous."""
    assert ids.is_contiguous()
    num_tokens, num_slots = ids.shape
    most = max_tiles(num_tokens * num_slots, num_experts, small_block)
    width = next_power_of_2(num_slots)
    largest = FEW_EXPERTS_SHAPE if num_experts <= FEW_EXPERTS else SHAPES[-1]
    chunk, num_warps = next((s for s in SHAPES if num_tokens * width <= s[0]), largest)
    buffer = ids.new_empty(most * (block + 1) + 2, dtype=torch.int32)
    sort_kernel[(num_experts,)](
        ids,
        buffer,
        num_tokens,
        most,
        num_slots,
        width,
        num_experts,
        next_power_of_2(max(num_experts, 32)),
        block,
        small_block,
        max(chunk // width, 1),
        128,
        num_warps=num_warps,
        **chain.options(),
    )
    end = most * block
    return buffer[:end], buffer[end:-2], buffer[-2:]


BACKEND = Backend("triton", run, why_not)
