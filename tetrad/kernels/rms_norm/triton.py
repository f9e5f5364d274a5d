"""RMS norm: a program per row, which it holds in registers."""

from __future__ import annotations

from torch import Tensor

from tetrad.kernels import chain
from tetrad.kernels.backend import Backend
from tetrad.kernels.triton_support import jit, next_power_of_2, row_warps, tl, why_not


@jit()
def normalised(value, scale, eps, WIDTH: tl.constexpr):
    """A row, all zeros behind its WIDTH columns, in fp32."""
    return value * tl.rsqrt(tl.sum(value * value) / WIDTH + eps) * scale


@jit()
def rms_norm_kernel(x, weight, normed, eps, stride, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """`stride` is from row to row of `x`."""
    chain.after_previous()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    is_inside = column < WIDTH
    value = tl.load(x + row * stride + column, mask=is_inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=is_inside, other=0.0).to(tl.float32)
    result = normalised(value, scale, eps, WIDTH)
    chain.before_next()
    tl.store(normed + row * WIDTH + column, result.to(normed.dtype.element_ty), mask=is_inside)


def run(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Columns of `x` must lie side by side."""
    num_rows, width = x.shape
    normed = x.new_empty(num_rows, width)
    columns = next_power_of_2(width)
    rms_norm_kernel[(num_rows,)](
        x, weight, normed, eps, x.stride(0), width, columns,
        num_warps=row_warps(columns), **chain.options(),
    )  # fmt: skip
    return normed


BACKEND = Backend("triton", run, why_not)
