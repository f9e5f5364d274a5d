"""Rows of finite numbers in two launches: each stretch of a row is looked at, then each row's
verdict is read off. Nothing is written to a row that is finite."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.kernels import chain
from tetrad.kernels.backend import Backend
from tetrad.kernels.triton_support import cdiv, jit, next_power_of_2, tl, why_not

STRETCH = 4096
"""Numbers that one program looks at."""


@jit()
def look_kernel(
    logits, is_spoiled, NUM_COLUMNS: tl.constexpr, STRETCHES: tl.constexpr, SIZE: tl.constexpr
):
    """1 for a stretch that holds NaN or infinity."""
    chain.after_previous()
    row = tl.program_id(0).to(tl.int64)
    stretch = tl.program_id(1)
    column = stretch * SIZE + tl.arange(0, SIZE)
    value = tl.load(logits + row * NUM_COLUMNS + column, mask=column < NUM_COLUMNS, other=0.0)
    # false for NaN, too
    is_finite = tl.abs(value) < float("inf")
    spoiled = tl.max(tl.where(is_finite, 0, 1), axis=0)
    chain.before_next()
    tl.store(is_spoiled + row * STRETCHES + stretch, spoiled)


@jit()
def judge_kernel(
    logits,
    is_spoiled,
    is_finite,
    NUM_COLUMNS: tl.constexpr,
    STRETCHES: tl.constexpr,
    SLOTS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """A program per row: its verdict, and 0 over all of it if a stretch is spoiled."""
    chain.after_previous()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    stretches = tl.load(is_spoiled + row * STRETCHES + slot, mask=slot < STRETCHES, other=0)
    spoiled = tl.max(stretches, axis=0)
    tl.store(is_finite + row, (1 - spoiled).to(tl.int8))
    chain.before_next()
    if spoiled > 0:
        for start in range(0, NUM_COLUMNS, SIZE):
            column = start + tl.arange(0, SIZE)
            zero = tl.zeros([SIZE], tl.float32)
            tl.store(logits + row * NUM_COLUMNS + column, zero, mask=column < NUM_COLUMNS)


def run(logits: Tensor) -> tuple[Tensor, Tensor]:
    """`logits` must be contiguous."""
    assert logits.is_contiguous()
    num_rows, num_columns = logits.shape
    stretches = cdiv(num_columns, STRETCH)
    is_spoiled = logits.new_empty(num_rows, stretches, dtype=torch.int32)
    is_finite = logits.new_empty(num_rows, dtype=torch.int8)
    look_kernel[(num_rows, stretches)](
        logits, is_spoiled, num_columns, stretches, STRETCH, num_warps=4, **chain.options()
    )
    slots = next_power_of_2(stretches)
    judge_kernel[(num_rows,)](
        logits, is_spoiled, is_finite, num_columns, stretches, slots, STRETCH,
        num_warps=1, **chain.options(),
    )  # fmt: skip
    return logits, is_finite.view(torch.bool)


BACKEND = Backend("triton", run, why_not)
