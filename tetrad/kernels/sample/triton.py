"""Sampling without a sort.

What top-k and top-p keep is everything above a threshold, and of the tokens at it those with low
ids. One program per row finds the threshold by bisection: over the whole row until few tokens are
left between the bounds, then over those in registers. The draw runs in order of token ids, so that
it needs sums of stretches of the vocabulary and no order of probabilities.

Sums are made in an order that depends on the size of the vocabulary alone: a row gives the same
token in any batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.kernels import chain
from tetrad.kernels.backend import Backend
from tetrad.kernels.sample.triton_search import kept_by_both, nth_token, value_of, weigh
from tetrad.kernels.triton_support import cdiv, jit, next_power_of_2, tl, why_not

STRETCH = 4096
"""Tokens of one program where a row is shared out."""

BLOCK = 4096
"""Tokens that the program of a whole row reads at a time."""

TILE = 2048
"""Tokens between the bounds that are few enough for registers."""

BY_ROW = ["temperature", "top_k", "top_p", "min_p", "uniform", "thresholds", "last_ties"]
"""Pointers to one number a row, from anywhere: kernels do not rely on their alignment."""


@jit()
def _kept_weights(
    logits,
    begin,
    peak,
    scale,
    threshold,
    last_tie,
    min_p,
    NUM_TOKENS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Weights from `begin` on, 0 for what the rules drop."""
    token = begin + tl.arange(0, SIZE)
    value = tl.load(logits + token, mask=token < NUM_TOKENS, other=float("-inf"))
    weight = weigh(value, peak, scale)
    is_kept = (value > threshold) | ((value == threshold) & (token <= last_tie))
    return tl.where(is_kept & (weight >= min_p) & (token < NUM_TOKENS), weight, 0.0)


@jit()
def peak_kernel(
    logits, peaks, best, NUM_TOKENS: tl.constexpr, STRETCHES: tl.constexpr, SIZE: tl.constexpr
):
    """Largest logit of each stretch, and the first token that has it."""
    chain.after_previous()
    row = tl.program_id(0).to(tl.int64)
    stretch = tl.program_id(1)
    token = stretch * SIZE + tl.arange(0, SIZE)
    source = logits + row * NUM_TOKENS + token
    value = tl.load(source, mask=token < NUM_TOKENS, other=float("-inf"))
    place = tl.argmax(value, axis=0)
    tl.store(peaks + row * STRETCHES + stretch, tl.max(value))
    chain.before_next()
    tl.store(best + row * STRETCHES + stretch, stretch * SIZE + place)


@jit()
def _peak_of_row(peaks, best, row, STRETCHES: tl.constexpr, SLOTS: tl.constexpr):
    """The row's largest logit and the first token that has it."""
    stretch = tl.arange(0, SLOTS)
    is_real = stretch < STRETCHES
    peak = tl.load(peaks + row * STRETCHES + stretch, mask=is_real, other=float("-inf"))
    return tl.max(peak), tl.load(best + row * STRETCHES + tl.argmax(peak, axis=0))


@jit()
def greedy_kernel(peaks, best, ids, STRETCHES: tl.constexpr, SLOTS: tl.constexpr):
    """The best token of each row."""
    chain.after_previous()
    row = tl.program_id(0).to(tl.int64)
    _, token = _peak_of_row(peaks, best, row, STRETCHES, SLOTS)
    chain.before_next()
    tl.store(ids + row, token.to(tl.int64))


@jit(do_not_specialize_on_alignment=BY_ROW)
def threshold_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    peaks,
    best,
    thresholds,
    last_ties,
    scratch,
    NUM_TOKENS: tl.constexpr,
    STRETCHES: tl.constexpr,
    SLOTS: tl.constexpr,
    SIZE: tl.constexpr,
    FEW: tl.constexpr,
):
    """What top-k and top-p keep: all above a row's threshold, and tokens at it up to the last."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * NUM_TOKENS
    heat = tl.load(temperature + row)
    most = tl.minimum(tl.load(top_k + row), NUM_TOKENS).to(tl.int32)
    share = tl.load(top_p + row)
    threshold = tl.cast(float("-inf"), tl.float32)
    last_tie = tl.cast(NUM_TOKENS, tl.int32)
    if (heat > 0.0) & (((most > 0) & (most < NUM_TOKENS)) | (share < 1.0)):
        peak, _ = _peak_of_row(peaks, best, row, STRETCHES, SLOTS)
        key, num_equal, ties = kept_by_both(
            logits, scratch + row * FEW, most, share, peak, 1.0 / heat, NUM_TOKENS, SIZE, FEW
        )
        threshold = value_of(key)
        if ties < num_equal:
            last_tie = nth_token(logits, key, ties, NUM_TOKENS, SIZE)
    tl.store(thresholds + row, threshold)
    tl.store(last_ties + row, last_tie)


@jit(do_not_specialize_on_alignment=BY_ROW)
def weight_kernel(
    logits,
    temperature,
    min_p,
    peaks,
    best,
    thresholds,
    last_ties,
    weights,
    NUM_TOKENS: tl.constexpr,
    STRETCHES: tl.constexpr,
    SLOTS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Weight of what is kept of each stretch."""
    row = tl.program_id(0).to(tl.int64)
    stretch = tl.program_id(1)
    heat = tl.load(temperature + row)
    if heat > 0.0:
        peak, _ = _peak_of_row(peaks, best, row, STRETCHES, SLOTS)
        kept = _kept_weights(
            logits + row * NUM_TOKENS,
            stretch * SIZE,
            peak,
            1.0 / heat,
            tl.load(thresholds + row),
            tl.load(last_ties + row),
            tl.load(min_p + row),
            NUM_TOKENS,
            SIZE,
        )
        tl.store(weights + row * STRETCHES + stretch, tl.sum(kept))


@jit()
def _first(is_wanted, is_possible, SIZE: tl.constexpr):
    """The first place that is both; if none is, the last possible one; if none is, 0."""
    place = tl.arange(0, SIZE)
    found = tl.min(tl.where(is_wanted & is_possible, place, SIZE))
    last = tl.max(tl.where(is_possible, place, 0))
    return tl.where(found < SIZE, found, last)


@jit(do_not_specialize_on_alignment=BY_ROW)
def draw_kernel(
    logits,
    temperature,
    min_p,
    uniform,
    peaks,
    best,
    thresholds,
    last_ties,
    weights,
    ids,
    NUM_TOKENS: tl.constexpr,
    STRETCHES: tl.constexpr,
    SLOTS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Walk along the stretches, then along the tokens of one, to where the row's number points."""
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    peak, token = _peak_of_row(peaks, best, row, STRETCHES, SLOTS)
    if heat > 0.0:
        slot = tl.arange(0, SLOTS)
        weight = tl.load(weights + row * STRETCHES + slot, mask=slot < STRETCHES, other=0.0)
        weight = weight.to(tl.float64)
        reached = tl.cumsum(weight, 0)
        target = tl.load(uniform + row).to(tl.float64) * tl.sum(weight)
        stretch = _first(reached > target, weight > 0.0, SLOTS)
        before = tl.sum(tl.where(slot < stretch, weight, 0.0))
        kept = _kept_weights(
            logits + row * NUM_TOKENS,
            stretch * SIZE,
            peak,
            1.0 / heat,
            tl.load(thresholds + row),
            tl.load(last_ties + row),
            tl.load(min_p + row),
            NUM_TOKENS,
            SIZE,
        )
        left = (target - before).to(tl.float32)
        token = stretch * SIZE + _first(tl.cumsum(kept, 0) > left, kept > 0.0, SIZE)
    tl.store(ids + row, token.to(tl.int64))


def run(
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    uniform: Tensor | None = None,
) -> Tensor:
    """All arguments must be contiguous."""
    assert logits.is_contiguous()
    num_rows, num_tokens = logits.shape
    stretches = cdiv(num_tokens, STRETCH)
    slots = next_power_of_2(max(4, stretches))
    floats = logits.new_empty(num_rows * (2 * slots + TILE + 1))
    peaks, weights, scratch, thresholds = floats.split(
        [num_rows * size for size in (slots, slots, TILE, 1)]
    )
    best = logits.new_empty(num_rows, stretches, dtype=torch.int32)
    ids = logits.new_empty(num_rows, dtype=torch.int64)
    grid = (num_rows, stretches)
    how = chain.options()
    peak_kernel[grid](logits, peaks, best, num_tokens, stretches, STRETCH, num_warps=4, **how)
    if temperature is None:
        greedy_kernel[(num_rows,)](peaks, best, ids, stretches, slots, num_warps=1, **how)
        return ids
    last_ties = logits.new_empty(num_rows, dtype=torch.int32)
    found = (peaks, best, thresholds, last_ties)
    shape = (num_tokens, stretches, slots)
    threshold_kernel[(num_rows,)](
        logits, temperature, top_k, top_p, *found, scratch, *shape, BLOCK, TILE, num_warps=16
    )
    weight_kernel[grid](logits, temperature, min_p, *found, weights, *shape, STRETCH, num_warps=4)
    draw_kernel[(num_rows,)](
        logits, temperature, min_p, uniform, *found, weights, ids, *shape, STRETCH, num_warps=8
    )
    return ids


BACKEND = Backend("triton", run, why_not)
