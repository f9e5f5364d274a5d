"""Pieces of the Gluon kernels: layouts, decoding, addresses, the end of a tile.

A layout says which thread holds which element; Gluon wants them spelled out, and a conversion
between two that agree costs nothing. Where Gluon is missing the module imports all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = [
    "copy", "decode", "fragments", "gl", "gluon", "hopper", "in_a_row", "in_turn", "jit", "place",
    "refill", "rows_of", "start_copy", "store", "token_at",
]  # fmt: skip

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.language.nvidia.ampere import async_copy as copy

    # renamed in Triton 3.9
    start_copy = getattr(copy, "async_load", None) or copy.async_copy_global_to_shared
except ImportError:
    gluon = gl = hopper = copy = start_copy = None


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
def fragments(granules: int, warps: int) -> Any:
    """[granule, block, g, t, k32]: the words of `packing.py` that each lane of a warp decodes."""
    registers = [[0, 0, 0, 0, 1]]
    registers += [[b, 0, 0, 0, 0] for b in _powers(1, granules, 1)]
    registers += [[0, b, 0, 0, 0] for b in _powers(warps, 8, 1)]
    lanes = [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [0, 0, 1, 0, 0], [0, 0, 2, 0, 0], [0, 0, 4, 0, 0]]
    of_warps = [[0, b, 0, 0, 0] for b in _powers(1, warps, 1)]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [granules, 8, 8, 4, 2])


@constant
def in_a_row(granules: int, warps: int, lane_step: int) -> Any:
    """The same for the words (lane_step 2) or the scales (lane_step 0) of a tile in one row."""
    group = 8 if lane_step else 2
    block = 8 * group
    registers = [[1]]
    registers += [[b] for b in _powers(1, granules, 8 * block)]
    registers += [[b] for b in _powers(warps, 8, block)]
    lanes = [[lane_step], [2 * lane_step], [group], [2 * group], [4 * group]]
    of_warps = [[b] for b in _powers(1, warps, block)]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [granules * 8 * block])


@constant
def in_turn(each: int, warps: int) -> Any:
    """A vector dealt out to all threads, at most two neighbours to each."""
    return gl.BlockedLayout([max(1, min(each, 2))], [32], [warps], [0])


@constant
def rows_of(width: int, warps: int) -> Any:
    """[row, column]: rows of `width` 16-bit numbers, 16 bytes to a thread, a row to neighbours."""
    return gl.BlockedLayout([1, 8], [256 // width, width // 8], [warps, 1], [1, 0])


@jit()
def decode(
    words, scales, BK: gl.constexpr, FRAGMENTS: gl.constexpr, OPERAND: gl.constexpr,
    PTX: gl.constexpr,
):  # fmt: skip
    """bf16 [128, BK] in the registers that wgmma takes as its left operand."""
    w = gl.convert_layout(words.reshape([BK // 64, 8, 8, 4, 2]), FRAGMENTS)
    s = scales.reshape([BK // 64, 8, 8, 2])
    s = gl.convert_layout(s, gl.SliceLayout(3, FRAGMENTS)).expand_dims(3)
    p = gl.inline_asm_elementwise(
        PTX,
        "=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,l,r",
        [w, s],
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
    return gl.convert_layout(a.reshape([128, BK]), OPERAND)


@jit()
def place(item, tiles, NUM_COLUMNS: gl.constexpr, GROUP: gl.constexpr):
    """Token tile and weight tile of an item: GROUP token tiles side by side."""
    group = item // (GROUP * NUM_COLUMNS)
    size = gl.minimum(tiles - group * GROUP, GROUP)
    inside = item - group * (GROUP * NUM_COLUMNS)
    return group * GROUP + inside % size, inside // size


@jit()
def token_at(x, rows, position, k, IN: gl.constexpr, SLOTS: gl.constexpr, IS_GATE_UP: gl.constexpr):
    """Where the token rows at some positions begin: gathered for gate_up, in order for down."""
    source = position
    if IS_GATE_UP:
        source = gl.maximum(gl.load(rows + position), 0) // SLOTS
    return x + source.to(gl.int64).expand_dims(1) * IN + k


@jit()
def store(
    acc, rows, first, scale_at, out, column,
    OUT: gl.constexpr, IS_GATE_UP: gl.constexpr, BM: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Finish an accumulator [128, BM] and write its rows, padding left out."""
    FEATURES: gl.constexpr = 64 if IS_GATE_UP else 128
    LAYOUT: gl.constexpr = rows_of(FEATURES, num_warps)
    position = first + gl.arange(0, BM, layout=gl.SliceLayout(1, LAYOUT))
    row = gl.load(rows + position)
    if IS_GATE_UP:
        gate, up = acc.reshape([8, 2, 8, BM]).permute([0, 2, 3, 1]).split()
        gate = gate.reshape([64, BM]) * gl.load(scale_at)
        up = up.reshape([64, BM]) * gl.load(scale_at + 1)
        y = gate / (1.0 + gl.exp(-gate)) * up
        target = position
    else:
        y = acc * gl.load(scale_at)
        target = row
    y = gl.convert_layout(y.to(out.dtype.element_ty).permute([1, 0]), LAYOUT)
    feature = column * FEATURES + gl.arange(0, FEATURES, layout=gl.SliceLayout(0, LAYOUT))
    at = out + target.to(gl.int64).expand_dims(1) * OUT + feature.expand_dims(0)
    gl.store(at, y, mask=(row >= 0).expand_dims(1) & (feature < OUT).expand_dims(0))


@jit()
def refill(
    step, at, ring,
    STEPS: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, HAS_MORE: gl.constexpr,
):  # fmt: skip
    """Start the copies of a step; nothing past the last."""
    here = step < STEPS
    slot = step % STAGES
    start_copy(ring[0].index(slot), at[0] + step * (BK * 8), mask=here)
    start_copy(ring[1].index(slot), at[1] + step * (BK * 2), mask=here)
    start_copy(ring[2].index(slot), at[2] + step * BK, mask=here)
    if HAS_MORE:
        start_copy(ring[3].index(slot), at[3] + step * BK, mask=here)
    copy.commit_group()
