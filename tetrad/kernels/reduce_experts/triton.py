"""Adding up experts: a program per token and stretch of columns, slots in order in registers."""

from __future__ import annotations

from torch import Tensor

from tetrad.kernels.backend import Backend
from tetrad.kernels.triton_support import cdiv, jit, next_power_of_2, tl, why_not

FEW_TOKENS = 64
MAX_COLUMNS = (1024, 2048)
"""Columns of one program, with few tokens and with more: each program reads its token's slots
first, so that wide ones waste less, but one token should keep more than a few programs busy."""


@jit()
def reduce_kernel(
    rows,
    ids,
    slot_weights,
    shared,
    residual,
    y,
    WIDTH: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A dropped slot has no width, so that its row is not read. `shared` and `residual`
    may be None."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_inside = column < WIDTH
    total = tl.zeros([COLUMNS], tl.float32)
    for slot in tl.static_range(NUM_SLOTS):
        at = token * NUM_SLOTS + slot
        width = tl.where(tl.load(ids + at) >= 0, WIDTH, 0)
        weight = tl.load(slot_weights + at)
        row = tl.load(rows + at * WIDTH + column, mask=column < width, other=0.0)
        total += tl.where(column < width, row.to(tl.float32) * weight, 0.0)
    if shared is not None:
        extra = tl.load(shared + token * WIDTH + column, mask=is_inside, other=0.0)
        total += extra.to(tl.float32)
    if residual is not None:
        extra = tl.load(residual + token * WIDTH + column, mask=is_inside, other=0.0)
        total += extra.to(tl.float32)
    tl.store(y + token * WIDTH + column, total.to(y.dtype.element_ty), mask=is_inside)


def run(
    rows: Tensor,
    ids: Tensor,
    slot_weights: Tensor,
    shared: Tensor | None,
    residual: Tensor | None = None,
) -> Tensor:
    """All arguments must be contiguous."""
    assert rows.is_contiguous()
    num_tokens, num_slots = ids.shape
    width = rows.shape[1]
    y = rows.new_empty(num_tokens, width)
    columns = min(MAX_COLUMNS[num_tokens > FEW_TOKENS], next_power_of_2(width))
    reduce_kernel[(num_tokens, cdiv(width, columns))](
        rows, ids, slot_weights, shared, residual, y, width, num_slots, columns, num_warps=4
    )
    return y


BACKEND = Backend("triton", run, why_not)
