"""Layer norm: a program per row, which it holds in registers."""

from __future__ import annotations

from torch import Tensor

from tetrad.kernels.backend import Backend
from tetrad.kernels.triton_support import jit, next_power_of_2, row_warps, tl, why_not


@jit()
def layer_norm_kernel(
    x, weight, bias, normed, eps, stride, WIDTH: tl.constexpr, COLUMNS: tl.constexpr
):
    """The variance is that of the deviations, not a difference of two large sums."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    is_inside = column < WIDTH
    value = tl.load(x + row * stride + column, mask=is_inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=is_inside, other=0.0)
    shift = tl.load(bias + column, mask=is_inside, other=0.0)
    deviation = tl.where(is_inside, value - tl.sum(value) / WIDTH, 0.0)
    variance = tl.sum(deviation * deviation) / WIDTH
    result = deviation * tl.rsqrt(variance + eps) * scale + shift
    tl.store(normed + row * WIDTH + column, result.to(normed.dtype.element_ty), mask=is_inside)


def run(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Columns of `x` must lie side by side."""
    num_rows, width = x.shape
    normed = x.new_empty(num_rows, width)
    columns = next_power_of_2(width)
    layer_norm_kernel[(num_rows,)](
        x, weight, bias, normed, eps, x.stride(0), width, columns, num_warps=row_warps(columns)
    )
    return normed


BACKEND = Backend("triton", run, why_not)
