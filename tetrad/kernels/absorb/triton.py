"""Absorbed queries of few rows in one launch, whose programs read a stretch of a head's columns
each; the first of a head's rotates too. Where rows are many cuBLAS multiplies."""

from __future__ import annotations

from torch import Tensor

from tetrad.kernels.absorb import cublas
from tetrad.kernels.backend import Backend
from tetrad.kernels.rope.triton import turn
from tetrad.kernels.triton_support import cdiv, jit, next_power_of_2, tl, why_not

MOST_ROWS = 64
"""Up to here reading the weights is nearly all of the work."""
COLUMNS = 64
"""Of the result, of one program: GLM-5's 64 heads of 512 are 512 programs."""
DEPTH = 64
"""Of the sum, at one time."""
FEW_ROWS = 16
"""Products have no smaller edge; up to here a program takes no more shared memory than that."""


@jit()
def _rotate(
    source, target, cos, sin, row, is_row, source_stride, target_stride,
    NUM_PAIRS: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The tail of one head's rows."""
    place = tl.arange(0, 2 * PAIRS)
    is_inside = is_row[:, None] & (place < 2 * NUM_PAIRS)[None, :]
    values = tl.load(
        source + row[:, None] * source_stride + place[None, :], mask=is_inside, other=0.0
    )
    pair = tl.arange(0, PAIRS)
    at = row[:, None] * NUM_PAIRS + pair[None, :]
    is_pair = is_row[:, None] & (pair < NUM_PAIRS)[None, :]
    c = tl.load(cos + at, mask=is_pair, other=0.0)
    s = tl.load(sin + at, mask=is_pair, other=0.0)
    turned = turn(values, c, s, ROWS, PAIRS, True).to(target.dtype.element_ty)
    tl.store(target + row[:, None] * target_stride + place[None, :], turned, mask=is_inside)


@jit(do_not_specialize=["num_rows"])
def absorb_kernel(
    queries, weight, cos, sin, absorbed, num_rows,
    NUM_HEADS: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, NUM_PAIRS: tl.constexpr,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """All rows of one head and COLUMNS columns of its result."""
    TAIL: tl.constexpr = 2 * NUM_PAIRS
    head = tl.program_id(0)
    row = tl.arange(0, ROWS)
    is_row = row < num_rows
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < RANK
    depth = tl.arange(0, DEPTH)
    source = queries + head * (WIDTH + TAIL)
    source_stride = NUM_HEADS * (WIDTH + TAIL)
    matrix = weight + head.to(tl.int64) * (WIDTH * RANK)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in tl.range(0, WIDTH, DEPTH, num_stages=STAGES):
        is_deep = first + depth < WIDTH
        x = tl.load(
            source + row[:, None] * source_stride + (first + depth)[None, :],
            mask=is_row[:, None] & is_deep[None, :], other=0.0,
        )  # fmt: skip
        w = tl.load(
            matrix + (first + depth)[:, None] * RANK + column[None, :],
            mask=is_deep[:, None] & is_column[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(x, w, total, input_precision="ieee")
    target = absorbed + head * (RANK + TAIL)
    target_stride = NUM_HEADS * (RANK + TAIL)
    tl.store(
        target + row[:, None] * target_stride + column[None, :],
        total.to(absorbed.dtype.element_ty), mask=is_row[:, None] & is_column[None, :],
    )  # fmt: skip
    if tl.program_id(1) == 0:
        _rotate(
            source + WIDTH, target + RANK, cos, sin, row, is_row, source_stride, target_stride,
            NUM_PAIRS, PAIRS, ROWS,
        )  # fmt: skip


def run(queries: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One launch for up to MOST_ROWS rows; all arguments must be contiguous."""
    num_rows, num_heads, columns = queries.shape
    if num_rows > MOST_ROWS:
        return cublas.run(queries, weight, cos, sin)
    _, width, rank = weight.shape
    absorbed = queries.new_empty(num_rows, num_heads, rank + columns - width)
    num_pairs = cos.shape[1]
    # GLM-5's 192 are three steps: all on their way at once, or two where they bring 64 rows each.
    rows, stages = (FEW_ROWS, 4) if num_rows <= FEW_ROWS else (MOST_ROWS, 3)
    absorb_kernel[(num_heads, cdiv(rank, COLUMNS))](
        queries, weight, cos, sin, absorbed, num_rows, num_heads, width, rank, num_pairs,
        next_power_of_2(num_pairs), rows, COLUMNS, DEPTH, stages,
        num_warps=4,
    )  # fmt: skip
    return absorbed


BACKEND = Backend("triton", run, why_not)
