"""Writing keys: a program per token. Offsets are 64 bits wide, for pools past 2^31 elements."""

from __future__ import annotations

from torch import Tensor

from tetrad.kernels.backend import Backend
from tetrad.kernels.triton_support import jit, next_power_of_2, tl, why_not


@jit()
def store_kernel(
    pool,
    slots,
    left,
    right,
    left_stride,
    right_stride,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    LEFT_COLUMNS: tl.constexpr,
    RIGHT_COLUMNS: tl.constexpr,
):
    """Copy both parts of one key as they are."""
    token = tl.program_id(0).to(tl.int64)
    target = pool + tl.load(slots + token).to(tl.int64) * (LEFT + RIGHT)
    column = tl.arange(0, LEFT_COLUMNS)
    part = tl.load(left + token * left_stride + column, mask=column < LEFT)
    tl.store(target + column, part, mask=column < LEFT)
    column = tl.arange(0, RIGHT_COLUMNS)
    part = tl.load(right + token * right_stride + column, mask=column < RIGHT)
    tl.store(target + LEFT + column, part, mask=column < RIGHT)


def run(pool: Tensor, slots: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Columns of `left` and `right` must lie side by side; `pool` must be contiguous."""
    assert pool.is_contiguous()
    num_tokens, left_width = left.shape
    right_width = right.shape[1]
    store_kernel[(num_tokens,)](
        pool,
        slots,
        left,
        right,
        left.stride(0),
        right.stride(0),
        left_width,
        right_width,
        next_power_of_2(left_width),
        next_power_of_2(right_width),
        num_warps=2,
    )
    return pool


BACKEND = Backend("triton", run, why_not)
