"""Pieces of the Gluon kernels: layouts, decoding, addresses, the end of a tile.

A layout says which thread holds which element; Gluon wants them spelled out, and a conversion
between two that agree costs nothing. Where Gluon is missing the module imports all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tetrad.kernels.experts.decode import GATED_PTX

__all__ = [
    "arrival", "barrier", "copy", "copy_tokens", "decode", "factors_of", "gl", "gluon", "hopper",
    "in_turn", "is_last_part", "item_of", "jit", "mbarrier", "refill", "rows_of", "size_of",
    "start_copy", "store", "sum_of_parts", "token_at", "token_ring", "wait", "weight_rings",
]  # fmt: skip

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.language.nvidia.ampere import async_copy as copy
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier

    # the second names are those of Triton 3.6 to 3.8
    start_copy = getattr(copy, "async_load", None) or copy.async_copy_global_to_shared
    barrier = getattr(gl, "barrier", None) or gl.thread_barrier
except ImportError:
    gluon = gl = hopper = copy = mbarrier = start_copy = barrier = None


def jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`gluon.jit`, or the function as it is where nothing could compile it."""
    if gluon is None:
        return lambda kernel: kernel
    decorate: Callable[[Callable[..., Any]], Any] = gluon.jit(**options)
    return decorate


def constant(function: Callable[..., Any]) -> Any:
    """A function that kernels call while they are compiled."""
    return function if gluon is None else gluon.constexpr_function(function)


@constant
def _powers(first: int, end: int, unit: int) -> list[int]:
    """unit * first, unit * 2 first, ... while below unit * end."""
    found = []
    while first < end:
        found.append(unit * first)
        first *= 2
    return found


@constant
def fragments(warps: int) -> Any:
    """[granule, block, g, t, k32]: the words of `packing.py` that each lane of a warp decodes."""
    registers = [[0, 0, 0, 0, 1]]
    registers += [[0, b, 0, 0, 0] for b in _powers(warps, 8, 1)]
    lanes = [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [0, 0, 1, 0, 0], [0, 0, 2, 0, 0], [0, 0, 4, 0, 0]]
    of_warps = [[0, b, 0, 0, 0] for b in _powers(1, warps, 1)]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [1, 8, 8, 4, 2])


@constant
def in_a_row(warps: int, lane_step: int) -> Any:
    """The same for the words (lane_step 2) or the scales (lane_step 0) of a granule in one row."""
    group = 8 if lane_step else 2
    block = 8 * group
    registers = [[1]] + [[b] for b in _powers(warps, 8, block)]
    lanes = [[lane_step], [2 * lane_step], [group], [2 * group], [4 * group]]
    of_warps = [[b] for b in _powers(1, warps, block)]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [8 * block])


@constant
def in_turn(each: int, warps: int) -> Any:
    """A vector dealt out to all threads, at most two neighbours to each."""
    return gl.BlockedLayout([max(1, min(each, 2))], [32], [warps], [0])


@constant
def rows_of(width: int, warps: int) -> Any:
    """[row, column]: rows of `width` 16-bit numbers, 16 bytes to a thread, a row to neighbours."""
    return gl.BlockedLayout([1, 8], [256 // width, width // 8], [warps, 1], [1, 0])


@jit()
def decode(words, scales, by, OPERAND: gl.constexpr, PTX: gl.constexpr, num_warps: gl.constexpr):
    """bf16 [128, 64] of a granule in shared memory, in the registers of wgmma's left operand.

    `by` are FACTORS.
    """
    FRAGMENTS: gl.constexpr = fragments(num_warps)
    w = words.load(in_a_row(num_warps, 2)).reshape([1, 8, 8, 4, 2])
    s = scales.load(in_a_row(num_warps, 0)).reshape([1, 8, 8, 2])
    w = gl.convert_layout(w, FRAGMENTS)
    s = gl.convert_layout(s, gl.SliceLayout(3, FRAGMENTS)).expand_dims(3)
    p = gl.inline_asm_elementwise(
        PTX,
        "=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,l,r,r,r,r",
        [w, s, by[0], by[1], by[2]],
        dtype=(
            gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
            gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
            gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
        ),
        is_pure=True,
        pack=1,
    )  # fmt: skip
    q0 = gl.join(gl.join(p[0], p[1]), gl.join(p[2], p[3]))
    q1 = gl.join(gl.join(p[4], p[5]), gl.join(p[6], p[7]))
    q2 = gl.join(gl.join(p[8], p[9]), gl.join(p[10], p[11]))
    q3 = gl.join(gl.join(p[12], p[13]), gl.join(p[14], p[15]))
    # axes: k granule, 16-row block, row in 8, lane pair, k32 | k parity, row half, k half, k16
    a = gl.join(gl.join(q0, q1), gl.join(q2, q3)).permute([1, 6, 2, 0, 4, 8, 7, 3, 5])
    return gl.convert_layout(a.reshape([128, 64]), OPERAND)


@jit()
def token_at(
    num_tokens, rows, position,
    IN: gl.constexpr, SLOTS: gl.constexpr, IS_GATE_UP: gl.constexpr,
):  # fmt: skip
    """int32 [position, 1]: groups of eight columns before the token rows at some positions,
    gathered for gate_up, in order for down.

    Padding reads some token or other: if it were always the same, its part of the L2 cache would
    hold everybody up.
    """
    source = position
    if IS_GATE_UP:
        row = gl.load(rows + position)
        source = gl.where(row >= 0, row // SLOTS, position % num_tokens)
    return (source * (IN // 8)).expand_dims(1)


@jit()
def copy_tokens(target, x_at, at, here):
    """Start the copy of token rows; `x_at` is where the first row has its columns of this step."""
    start_copy(target, x_at + at.to(gl.int64) * 8, mask=here)


@jit()
def store(
    acc, rows, first, factors, out, column,
    OUT: gl.constexpr, IS_GATE_UP: gl.constexpr, BM: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Finish an accumulator [128, BM] and write its rows, padding left out.

    `factors` are the global scales of gate and up, or that of down twice.
    """
    FEATURES: gl.constexpr = 64 if IS_GATE_UP else 128
    LAYOUT: gl.constexpr = rows_of(FEATURES, num_warps)
    position = first + gl.arange(0, BM, layout=gl.SliceLayout(1, LAYOUT))
    row = gl.load(rows + position)
    if IS_GATE_UP:
        gate, up = acc.reshape([8, 2, 8, BM]).permute([0, 2, 3, 1]).split()
        gate = gate.reshape([64, BM]) * factors[0]
        up = up.reshape([64, BM]) * factors[1]
        y = gl.inline_asm_elementwise(
            GATED_PTX, "=f,f,f", [gate, up], dtype=gl.float32, is_pure=True, pack=1
        )
        target = position
    else:
        y = acc * factors[0]
        target = row
    y = gl.convert_layout(y.to(out.dtype.element_ty).permute([1, 0]), LAYOUT)
    feature = column * FEATURES + gl.arange(0, FEATURES, layout=gl.SliceLayout(0, LAYOUT))
    at = out + target.to(gl.int64).expand_dims(1) * OUT + feature.expand_dims(0)
    gl.store(at, y, mask=(row >= 0).expand_dims(1) & (feature < OUT).expand_dims(0))


@jit()
def arrival(COPIES: gl.constexpr):
    """Wait until at most COPIES groups of copies are under way; wgmma may read what has come."""
    copy.wait_group(COPIES)
    hopper.fence_async_shared()


@jit()
def refill(
    first, stage, x_at, at, ring, STEPS: gl.constexpr, UNIT: gl.constexpr, HAS_MORE: gl.constexpr
):
    """Start the copies of UNIT steps into a stage of the ring; nothing past the last step."""
    for unit in gl.static_range(UNIT):
        step = first + unit
        here = step < STEPS
        slot = stage * UNIT + unit
        start_copy(ring[0].index(slot), at[0] + step * 512, mask=here)
        start_copy(ring[1].index(slot), at[1] + step * 128, mask=here)
        copy_tokens(ring[2].index(slot), x_at + step * 64, at[2], here)
        if HAS_MORE:
            copy_tokens(ring[3].index(slot), x_at + step * 64, at[3], here)
    copy.commit_group()


@jit()
def weight_rings(SLOTS: gl.constexpr):
    """Shared memory for the words and scales of SLOTS granules."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return (
        gl.allocate_shared_memory(gl.int64, [SLOTS, 512], PLAIN),
        gl.allocate_shared_memory(gl.int32, [SLOTS, 128], PLAIN),
    )


@jit()
def token_ring(SLOTS: gl.constexpr, ROWS: gl.constexpr):
    """Shared memory for 64 columns of ROWS token rows, SLOTS times, as wgmma reads it."""
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    return gl.allocate_shared_memory(gl.bfloat16, [SLOTS, ROWS, 64], SWIZZLED)


@jit()
def item_of(
    item, tile_expert, num_tiles,
    NUM_COLUMNS: gl.constexpr, IS_REST: gl.constexpr,
):  # fmt: skip
    """Token tile, weight tile and expert of an item; the expert is -1 where there is no work."""
    if IS_REST:
        tiles = gl.load(num_tiles + 1)
        tile = gl.load(num_tiles) + item // NUM_COLUMNS
        column = item % NUM_COLUMNS
        expert = gl.load(tile_expert + tile, mask=tile < tiles, other=-1)
        tile = gl.maximum(gl.minimum(tile, tiles - 1), 0)
    else:
        tile = item // NUM_COLUMNS
        column = item % NUM_COLUMNS
        expert = gl.load(tile_expert + tile)
    return tile, column, expert.to(gl.int64)


@jit()
def size_of(rows, first, SIZES: gl.constexpr):
    """Which of SIZES the tile that begins at position `first` takes: the smallest that holds it."""
    size = 0
    for smaller in gl.static_range(len(SIZES) - 1):
        is_full = gl.load(rows + first + SIZES[smaller][0] + SIZES[smaller][1]) >= 0
        size += is_full.to(gl.int32)
    return size


@jit()
def factors_of(global_scale, expert, IS_GATE_UP: gl.constexpr):
    """The global scales of gate and up, or that of down twice."""
    if IS_GATE_UP:
        first = gl.load(global_scale + expert * 2)
        second = gl.load(global_scale + expert * 2 + 1)
    else:
        first = gl.load(global_scale + expert)
        second = first
    return first, second


@jit()
def wait(STEPS: gl.constexpr, acc, acc_more, weights, MORE: gl.constexpr):
    """Wait until wgmma of at most STEPS steps is in flight; `weights` are then free."""
    if MORE > 0:
        acc, acc_more, weights = hopper.warpgroup_mma_wait(2 * STEPS, deps=[acc, acc_more, weights])
    else:
        acc, weights = hopper.warpgroup_mma_wait(STEPS, deps=[acc, weights])
    return acc, acc_more, weights


@jit()
def _part_at(BM: gl.constexpr, num_warps: gl.constexpr):
    """int32 [128, BM]: where an accumulator's numbers lie in its part of the scratch memory."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BM, 16])
    row = gl.arange(0, 128, layout=gl.SliceLayout(1, MMA)).expand_dims(1)
    return row * BM + gl.arange(0, BM, layout=gl.SliceLayout(0, MMA)).expand_dims(0)


@jit()
def is_last_part(
    acc, sums, arrived, part, PARTS: gl.constexpr, BM: gl.constexpr, num_warps: gl.constexpr
):
    """Write a part's sums and say whether all others of the item have written theirs.

    Whoever is last leaves `arrived` at 0 for the next launch.
    """
    gl.store(sums + part * (128 * BM) + _part_at(BM, num_warps), acc)
    barrier()
    is_last = gl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == PARTS - 1
    if is_last:
        gl.store(arrived, 0)
    return is_last


@jit()
def sum_of_parts(sums, PARTS: gl.constexpr, BM: gl.constexpr, num_warps: gl.constexpr):
    """[128, BM]: the parts in order, whoever was last, so that no bit depends on it."""
    at = _part_at(BM, num_warps)
    acc = gl.load(sums + at, cache_modifier=".cg")
    for part in gl.static_range(1, PARTS):
        acc += gl.load(sums + part * (128 * BM) + at, cache_modifier=".cg")
    return acc
