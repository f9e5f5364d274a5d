"""Gated activation: a program per row and stretch of columns."""

from __future__ import annotations

from torch import Tensor

from tetrad.kernels import chain
from tetrad.kernels.backend import Backend
from tetrad.kernels.triton_support import cdiv, jit, next_power_of_2, tl, why_not

MAX_COLUMNS = 1024
"""Columns of one program: eight for each thread."""


@jit()
def activation_kernel(
    gate, up, hidden, gate_stride, up_stride, WIDTH: tl.constexpr, COLUMNS: tl.constexpr
):
    """Strides are from row to row."""
    chain.after_previous()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_inside = column < WIDTH
    g = tl.load(gate + row * gate_stride + column, mask=is_inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=is_inside, other=0.0).to(tl.float32)
    result = g / (1.0 + tl.exp(-g)) * u
    chain.before_next()
    tl.store(hidden + row * WIDTH + column, result.to(hidden.dtype.element_ty), mask=is_inside)


def run(gate: Tensor, up: Tensor) -> Tensor:
    """Columns of both must lie side by side."""
    num_rows, width = gate.shape
    hidden = gate.new_empty(num_rows, width)
    columns = min(MAX_COLUMNS, next_power_of_2(width))
    activation_kernel[(num_rows, cdiv(width, columns))](
        gate, up, hidden, gate.stride(0), up.stride(0), width, columns,
        num_warps=4, **chain.options(),
    )  # fmt: skip
    return hidden


BACKEND = Backend("triton", run, why_not)
