"""Large tiles on Hopper: one program per multiprocessor takes item after item.

The loop of `gluon.py`, with copies that run on over the end of an item into the next. Every tile
has the whole size: each further size made the loop spill registers, 8 % and more on an H200.
"""

from __future__ import annotations

from tetrad.kernels import chain
from tetrad.kernels.experts.gluon_parts import (
    arrival,
    barrier,
    copy,
    copy_tokens,
    decode,
    factors_of,
    gl,
    hopper,
    in_turn,
    jit,
    rows_of,
    start_copy,
    store,
    token_at,
    token_ring,
    weight_rings,
)


@jit(
    do_not_specialize=["num_tokens", "two", "eight", "sixteen"],
    do_not_specialize_on_alignment=["tile_expert", "num_tiles"],
)
def persistent_product(
    x, words, scales, global_scale, rows, tile_expert, num_tiles, out, num_tokens,
    two, eight, sixteen,
    OUT: gl.constexpr, IN: gl.constexpr, SLOTS: gl.constexpr, IS_GATE_UP: gl.constexpr,
    BM: gl.constexpr, HAS_REST: gl.constexpr, STAGES: gl.constexpr, PTX: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """`gluon.grouped_product` for large tiles: every program takes each num_programs-th item.

    Copies run STAGES - 1 granules ahead, over the end of an item into the next. With HAS_REST,
    tiles of at most small_block rows are left to others.
    """
    gl.static_assert(IN // 64 % 2 == 0)
    gl.static_assert(IN // 64 >= STAGES)
    TOKENS: gl.constexpr = rows_of(64, num_warps)
    chain.after_previous()
    w_ring, s_ring = weight_rings(STAGES)
    ring = (w_ring, s_ring, token_ring(STAGES, BM))
    tiles = gl.load(num_tiles + (0 if HAS_REST else 1))
    chain.before_next()
    if gl.program_id(0) < tiles * (OUT // (64 if IS_GATE_UP else 128)):
        lanes = (
            gl.arange(0, 512, layout=in_turn(2, num_warps)),
            gl.arange(0, 128, layout=in_turn(1, num_warps)),
            gl.arange(0, BM, layout=gl.SliceLayout(1, TOKENS)),
            gl.arange(0, 64, layout=gl.SliceLayout(0, TOKENS)).expand_dims(0),
        )
        _items(
            (x, words, scales, global_scale, rows, tile_expert, out, num_tokens),
            tiles, ring, lanes,
            (two, eight, sixteen),
            OUT, IN, SLOTS, IS_GATE_UP, BM, STAGES, PTX, num_warps,
        )  # fmt: skip


@jit()
def _locate(
    item, tiles, tensors, lanes,
    OUT: gl.constexpr, IN: gl.constexpr, SLOTS: gl.constexpr, IS_GATE_UP: gl.constexpr,
    BM: gl.constexpr,
):  # fmt: skip
    """Where the first step of an item reads words, scales and columns, and the tokens' rows; past
    the end, of the last item."""
    x, words, scales, _global_scale, rows, tile_expert, _out, num_tokens = tensors
    NUM_COLUMNS: gl.constexpr = OUT // (64 if IS_GATE_UP else 128)
    item = gl.minimum(item, tiles * NUM_COLUMNS - 1)
    tile, column = item // NUM_COLUMNS, item % NUM_COLUMNS
    start = (gl.load(tile_expert + tile).to(gl.int64) * NUM_COLUMNS + column) * (IN // 64)
    t_at = token_at(num_tokens, rows, tile * BM + lanes[2], IN, SLOTS, IS_GATE_UP)
    return words + start * 512 + lanes[0], scales + start * 128 + lanes[1], x + lanes[3], t_at


@jit()
def _copy_step(slot, w_at, s_at, x_at, t_at, ring, here):
    """Start the copies of one step into a slot of the ring."""
    start_copy(ring[0].index(slot), w_at, mask=here)
    start_copy(ring[1].index(slot), s_at, mask=here)
    copy_tokens(ring[2].index(slot), x_at, t_at, here)
    copy.commit_group()


@jit()
def _items(
    tensors, tiles, ring, lanes, by,
    OUT: gl.constexpr, IN: gl.constexpr, SLOTS: gl.constexpr, IS_GATE_UP: gl.constexpr,
    BM: gl.constexpr, STAGES: gl.constexpr, PTX: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """All items of a program."""
    NUM_COLUMNS: gl.constexpr = OUT // (64 if IS_GATE_UP else 128)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    items = tiles * NUM_COLUMNS
    stride = gl.num_programs(0)
    ahead = gl.program_id(0)
    w_at, s_at, x_at, t_at = _locate(ahead, tiles, tensors, lanes, OUT, IN, SLOTS, IS_GATE_UP, BM)
    for step in gl.static_range(STAGES - 1):
        _copy_step(step, w_at, s_at, x_at, t_at, ring, ahead < items)
        w_at, s_at, x_at = w_at + 512, s_at + 128, x_at + 64
    ahead_step = STAGES - 1
    slot = 0
    for item in range(gl.program_id(0), items, stride):
        acc = gl.zeros([128, BM], gl.float32, MMA)
        odd = gl.zeros([128, 64], gl.bfloat16, OPERAND)
        for _pair in range(0, IN // 64, 2):
            for half in gl.static_range(2):
                arrival(STAGES - 2)
                a = decode(ring[0].index(slot), ring[1].index(slot), by, OPERAND, PTX, num_warps)
                tokens = ring[2].index(slot).permute([1, 0])
                acc = hopper.warpgroup_mma(a, tokens, acc, is_async=True)
                if half == 0:
                    acc, odd = hopper.warpgroup_mma_wait(1, deps=[acc, odd])
                    even = a
                else:
                    acc, even = hopper.warpgroup_mma_wait(1, deps=[acc, even])
                    odd = a
                barrier()
                free = slot - 1 if slot > 0 else STAGES - 1
                _copy_step(free, w_at, s_at, x_at, t_at, ring, ahead < items)
                w_at, s_at, x_at = w_at + 512, s_at + 128, x_at + 64
                slot = slot + 1 if slot < STAGES - 1 else 0
                ahead_step += 1
                if ahead_step == IN // 64:
                    ahead_step, ahead = 0, ahead + stride
                    w_at, s_at, x_at, t_at = _locate(
                        ahead, tiles, tensors, lanes, OUT, IN, SLOTS, IS_GATE_UP, BM
                    )
        acc, odd = hopper.warpgroup_mma_wait(0, deps=[acc, odd])
        tile, column = item // NUM_COLUMNS, item % NUM_COLUMNS
        factors = factors_of(tensors[3], gl.load(tensors[5] + tile).to(gl.int64), IS_GATE_UP)
        store(
            acc, tensors[4], tile * BM, factors, tensors[6], column,
            OUT, IS_GATE_UP, BM, num_warps,
        )  # fmt: skip
    copy.wait_group(0)
