"""The heads' linear layer of few rows, whose programs read a stretch of a head's columns each.

Reading the matrices is nearly all of the work. Programs are many and short, so that what a
multiprocessor's programs have on their way together hides the time until it comes. Where rows are
many cuBLAS multiplies.
"""

from __future__ import annotations

from torch import Tensor

from tetrad.kernels import chain
from tetrad.kernels.backend import Backend
from tetrad.kernels.head_linear import cublas
from tetrad.kernels.triton_support import cdiv, jit, next_power_of_2, tl, why_not

MOST_ROWS = 64
FEWEST_ROWS = 16
"""Products have no smaller edge."""
COLUMNS = 64
"""Of the result, of one program: of GLM-5's 64 heads 512 programs of 192 to 512 columns, and 256 of
512 to 256."""
DEPTH = 64
"""Of the sum, at one time."""


@jit()
def head_sums(
    x, matrix, row, is_row, row_stride, column, is_column,
    WIDTH: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """fp32 [ROWS, COLUMNS]: rows of one head's x times columns of its matrix [WIDTH, OUT]."""
    depth = tl.arange(0, DEPTH)
    x_at = x + row[:, None] * row_stride + depth[None, :]
    matrix_at = matrix + depth[:, None] * OUT + column[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in tl.range(0, WIDTH, DEPTH, num_stages=STAGES):
        x_mask, matrix_mask = is_row[:, None], is_column[None, :]
        if WIDTH % DEPTH:
            is_deep = first + depth < WIDTH
            x_mask, matrix_mask = x_mask & is_deep[None, :], matrix_mask & is_deep[:, None]
        rows = tl.load(x_at + first, mask=x_mask, other=0.0)
        columns = tl.load(matrix_at + first * OUT, mask=matrix_mask, other=0.0)
        total = tl.dot(rows, columns, total, input_precision="ieee")
    return total


@jit(do_not_specialize=["num_rows"])
def head_linear_kernel(
    x, weight, y, num_rows, row_stride, head_stride,
    NUM_HEADS: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """All rows of one head and COLUMNS columns of its result."""
    chain.after_previous()
    head = tl.program_id(0)
    row = tl.arange(0, ROWS)
    is_row = row < num_rows
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < OUT
    total = head_sums(
        x + head * head_stride, weight + head.to(tl.int64) * (WIDTH * OUT),
        row, is_row, row_stride, column, is_column, WIDTH, OUT, ROWS, COLUMNS, DEPTH, STAGES,
    )  # fmt: skip
    target = y + (row[:, None] * NUM_HEADS + head) * OUT + column[None, :]
    chain.before_next()
    tl.store(target, total.to(y.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def tile_for(num_rows: int) -> tuple[int, int, int]:
    """Rows of a program, stages and warps; up to 48 KiB of shared memory with bf16."""
    rows = max(FEWEST_ROWS, next_power_of_2(num_rows))
    return rows, 4 if rows < MOST_ROWS else 3, 4 if rows > FEWEST_ROWS else 2


def run(x: Tensor, weight: Tensor) -> Tensor:
    """One launch. Columns of `x` must lie side by side; `weight` must be contiguous."""
    num_rows, num_heads, width = x.shape
    if num_rows > MOST_ROWS:
        return cublas.run(x, weight)
    out = weight.shape[2]
    y = x.new_empty(num_rows, num_heads, out)
    rows, stages, warps = tile_for(num_rows)
    head_linear_kernel[(num_heads, cdiv(out, COLUMNS))](
        x, weight, y, num_rows, x.stride(0), x.stride(1), num_heads, width, out, rows, COLUMNS,
        DEPTH, stages,
        num_warps=warps, **chain.options(),
    )  # fmt: skip
    return y


BACKEND = Backend("triton", run, why_not)
