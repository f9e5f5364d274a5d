"""Absorbed queries of few rows in one launch: programs of `head_linear`, of which the first of each
head rotates its tail too. Where rows are many cuBLAS multiplies."""

from __future__ import annotations

from torch import Tensor

from tetrad.kernels import chain
from tetrad.kernels.absorb import cublas
from tetrad.kernels.backend import Backend
from tetrad.kernels.head_linear.triton import COLUMNS, DEPTH, MOST_ROWS, head_sums, tile_for
from tetrad.kernels.rope.triton import turn
from tetrad.kernels.triton_support import cdiv, jit, next_power_of_2, tl, why_not


@jit()
def _rotate(
    source, target, cos, sin, row, is_row, source_stride, target_stride,
    NUM_PAIRS: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The tail of one head's rows."""
    place = tl.arange(0, 2 * PAIRS)
    is_inside = is_row[:, None] & (place < 2 * NUM_PAIRS)[None, :]
    source += row[:, None] * source_stride
    values = tl.load(source + place[None, :], mask=is_inside, other=0.0).to(tl.float32)
    pair = tl.arange(0, PAIRS)
    at = row[:, None] * NUM_PAIRS + pair[None, :]
    is_pair = is_row[:, None] & (pair < NUM_PAIRS)[None, :]
    c = tl.load(cos + at, mask=is_pair, other=0.0)
    s = tl.load(sin + at, mask=is_pair, other=0.0)
    turned = turn(values, c, s, ROWS, PAIRS, True).to(target.dtype.element_ty)
    tl.store(target + row[:, None] * target_stride + place[None, :], turned, mask=is_inside)


@jit(do_not_specialize=["num_rows"])
def absorb_kernel(
    queries, weight, cos, sin, absorbed, num_rows, row_stride, head_stride,
    NUM_HEADS: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, NUM_PAIRS: tl.constexpr,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """All rows of one head and COLUMNS columns of its result."""
    chain.after_previous()
    head = tl.program_id(0)
    row = tl.arange(0, ROWS)
    is_row = row < num_rows
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < RANK
    source = queries + head * head_stride
    total = head_sums(
        source, weight + head.to(tl.int64) * (WIDTH * RANK),
        row, is_row, row_stride, column, is_column, WIDTH, RANK, ROWS, COLUMNS, DEPTH, STAGES,
    )  # fmt: skip
    target = absorbed + head * (RANK + 2 * NUM_PAIRS)
    target_stride = NUM_HEADS * (RANK + 2 * NUM_PAIRS)
    tl.store(
        target + row[:, None] * target_stride + column[None, :],
        total.to(absorbed.dtype.element_ty), mask=is_row[:, None] & is_column[None, :],
    )  # fmt: skip
    chain.before_next()
    if tl.program_id(1) == 0:
        _rotate(
            source + WIDTH, target + RANK, cos, sin, row, is_row, row_stride, target_stride,
            NUM_PAIRS, PAIRS, ROWS,
        )  # fmt: skip


def run(queries: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One launch where rows are few. Columns of `queries` must lie side by side, all else must be
    contiguous."""
    num_rows, num_heads, columns = queries.shape
    if num_rows > MOST_ROWS:
        return cublas.run(queries, weight, cos, sin)
    _, width, rank = weight.shape
    absorbed = queries.new_empty(num_rows, num_heads, rank + columns - width)
    num_pairs = cos.shape[1]
    rows, stages, warps = tile_for(num_rows)
    absorb_kernel[(num_heads, cdiv(rank, COLUMNS))](
        queries, weight, cos, sin, absorbed, num_rows, queries.stride(0), queries.stride(1),
        num_heads, width, rank, num_pairs, next_power_of_2(num_pairs), rows, COLUMNS, DEPTH, stages,
        num_warps=warps, **chain.options(),
    )  # fmt: skip
    return absorbed


BACKEND = Backend("triton", run, why_not)
