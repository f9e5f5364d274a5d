"""Sum and RMS norm: a program per row, which it holds in registers."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.kernels import chain
from tetrad.kernels.backend import Backend
from tetrad.kernels.rms_norm.triton import normalised
from tetrad.kernels.triton_support import jit, next_power_of_2, row_warps, tl, why_not


@jit()
def add_rms_norm_kernel(
    x, residual, more, weight, total, normed, eps, x_stride, residual_stride, more_stride,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What is normed is the sum as later layers will read it. `more` may be None."""
    chain.after_previous()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    is_inside = column < WIDTH
    value = tl.load(x + row * x_stride + column, mask=is_inside, other=0.0).to(tl.float32)
    before = tl.load(residual + row * residual_stride + column, mask=is_inside, other=0.0)
    before = before.to(tl.float32)
    if more is not None:
        third = tl.load(more + row * more_stride + column, mask=is_inside, other=0.0)
        before += third.to(tl.float32)
    scale = tl.load(weight + column, mask=is_inside, other=0.0).to(tl.float32)
    after = (value + before).to(total.dtype.element_ty)
    tl.store(total + row * WIDTH + column, after, mask=is_inside)
    result = normalised(after.to(tl.float32), scale, eps, WIDTH)
    chain.before_next()
    tl.store(normed + row * WIDTH + column, result.to(normed.dtype.element_ty), mask=is_inside)


def run(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    more: Tensor | None = None,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Columns of each addend must lie side by side, and `into` must be contiguous."""
    num_rows, width = x.shape
    total = x.new_empty(num_rows, width)
    normed = torch.empty_like(total) if into is None else into
    assert normed.is_contiguous()
    columns = next_power_of_2(width)
    add_rms_norm_kernel[(num_rows,)](
        x, residual, more, weight, total, normed, eps,
        x.stride(0), residual.stride(0), 0 if more is None else more.stride(0), width, columns,
        num_warps=row_warps(columns), **chain.options(),
    )  # fmt: skip
    return total, normed


BACKEND = Backend("triton", run, why_not)
