"""Adding up experts: a program per token and stretch of columns, slots in order in registers."""

from __future__ import annotations

import math

from torch import Tensor

from tetrad.kernels import chain
from tetrad.kernels.backend import Backend
from tetrad.kernels.triton_support import cdiv, jit, next_power_of_2, tl, why_not

SHAPES = ((64, 1024), (255, 2048), (1024, 1024), (math.inf, 2048))
"""(tokens at most, columns of a program). Each program reads its token's slots first, so that wide
ones waste less, but the GPU should be kept busy."""
SKIPS_FROM = 256
"""Tokens from which on so many programs run that none has to ask for several rows at once.
Measured on an H200 with 8 slots of 6144 columns, 2048 tokens: 18.3 µs instead of 25.8 where an
eighth of the slots is kept, 58.7 instead of 56.4 where all are."""


@jit()
def _all_slots(
    rows, ids, slot_weights, first, column,
    WIDTH: tl.constexpr, NUM_SLOTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """All slots' rows are asked for at once; a dropped slot's has no width, so it is not read."""
    total = tl.zeros([COLUMNS], tl.float32)
    for slot in tl.static_range(NUM_SLOTS):
        at = first + slot
        is_kept = tl.load(ids + at) >= 0
        is_read = column < tl.where(is_kept, WIDTH, 0)
        weight = tl.where(is_kept, tl.load(slot_weights + at), 0.0)
        row = tl.load(rows + at * WIDTH + column, mask=is_read, other=0.0)
        total += row.to(tl.float32) * weight
    return total


@jit()
def _kept_slots(
    rows, ids, slot_weights, first, column,
    WIDTH: tl.constexpr, NUM_SLOTS: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """One row at a time, and nothing is computed of dropped slots. All ids are read before: a row
    that waits for its id would keep the next id from being asked for."""
    slots = tl.arange(0, SLOTS)
    id = tl.load(ids + first + slots, mask=slots < NUM_SLOTS, other=-1)
    weights = tl.load(slot_weights + first + slots, mask=slots < NUM_SLOTS, other=0.0)
    total = tl.zeros([COLUMNS], tl.float32)
    for slot in tl.static_range(NUM_SLOTS):
        if tl.sum(tl.where((slots == slot) & (id >= 0), 1, 0)) > 0:
            weight = tl.sum(tl.where(slots == slot, weights, 0.0))
            row = rows + (first + slot) * WIDTH
            value = tl.load(row + column, mask=column < WIDTH, other=0.0)
            total += value.to(tl.float32) * weight
    return total


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
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SKIPS: tl.constexpr,
):
    """Both ways of adding slots give the same numbers. SLOTS: the power of two that holds
    NUM_SLOTS. `shared` and `residual` may be None."""
    chain.after_previous()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_inside = column < WIDTH
    first = token * NUM_SLOTS
    if SKIPS:
        total = _kept_slots(
            rows, ids, slot_weights, first, column, WIDTH, NUM_SLOTS, COLUMNS, SLOTS
        )
    else:
        total = _all_slots(rows, ids, slot_weights, first, column, WIDTH, NUM_SLOTS, COLUMNS)
    if shared is not None:
        extra = tl.load(shared + token * WIDTH + column, mask=is_inside, other=0.0)
        total += extra.to(tl.float32)
    if residual is not None:
        extra = tl.load(residual + token * WIDTH + column, mask=is_inside, other=0.0)
        total += extra.to(tl.float32)
    chain.before_next()
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
    most = next(columns for tokens, columns in SHAPES if num_tokens <= tokens)
    columns = min(most, next_power_of_2(width))
    reduce_kernel[(num_tokens, cdiv(width, columns))](
        rows,
        ids,
        slot_weights,
        shared,
        residual,
        y,
        width,
        num_slots,
        next_power_of_2(num_slots),
        columns,
        num_tokens >= SKIPS_FROM,
        num_warps=4,
        **chain.options(),
    )
    return y


BACKEND = Backend("triton", run, why_not)
