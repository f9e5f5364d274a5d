"""Top-k in order of position, exact, with ties to the lowest position.

A program holds a stretch of a row in registers, as integers that order as the scores do. It narrows
the range in which the k-th best lies until no more than k are left above, and writes what it keeps
side by side; a long stretch is read once more for that, from the cache. No sorting, no atomics.

Rows that are too long for one program are cut into stretches. What is best in a row is among the
best of its stretches, so these are written with their keys and are the next launch's rows. They lie
in order of position, so a tie is decided as it would have been in the row. How many launches there
are follows from the number of columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tetrad.kernels import chain
from tetrad.kernels.backend import Backend
from tetrad.kernels.sample.triton_search import key_of, value_of
from tetrad.kernels.triton_support import cdiv, constexpr, jit, next_power_of_2, tl, why_not

FEW_ROWS = 64
"""Up to here stretches are short, so that more programs share a row."""
SHORT_STRETCH, LONG_STRETCH = 1 << 13, 1 << 15
"""A long one fills half the registers of a multiprocessor."""
BLOCK = 1 << 12
"""What a program with a long stretch writes at a time."""

MARGIN = constexpr(1 / 16)
"""How far to either side of where the k-th best is expected to look for it, as a share of the range
it lies in."""
_HIDDEN = constexpr(-2139095041)
"""The key of -inf."""
_FAR = constexpr(2123789977)
"""The key of 1e38: differences of numbers up to it are finite."""


@jit()
def _keys(stretch, index, count, IS_FIRST: tl.constexpr):
    """Keys of the stretch at `index`; that of -inf from `count` on."""
    if IS_FIRST:
        score = tl.load(stretch + index, mask=index < count, other=float("-inf"))
        # a NaN must be chosen, or what follows would look healthy
        key = key_of(tl.where(score != score, float("inf"), score))
    else:
        key = tl.load(stretch + index, mask=index < count, other=_HIDDEN)
    return key


@jit()
def _two_keys(low, high, low_count, high_count, wanted, failures):
    """Two keys above `low` and below `high`, and in order: where the `wanted`-th best key should
    lie between them if keys fall evenly; after an odd number of failures in a row at thirds of the
    range as numbers, after an even one at thirds of it as keys."""
    share = (low_count - wanted).to(tl.float32) / (low_count - high_count).to(tl.float32)
    left = tl.where(failures == 0, share - MARGIN, 1 / 3)
    right = tl.where(failures == 0, share + MARGIN, 2 / 3)
    lowest = value_of(tl.maximum(low, -_FAR))
    width = value_of(tl.minimum(high, _FAR)) - lowest
    third = (high.to(tl.int64) - low) // 3
    is_by_key = (failures > 0) & (failures % 2 == 0)
    first = tl.where(is_by_key, (low + third).to(tl.int32), key_of(lowest + width * left))
    second = tl.where(is_by_key, (high - third).to(tl.int32), key_of(lowest + width * right))
    first = tl.minimum(tl.maximum(first, low + 1), high - 1)
    return first, tl.minimum(tl.maximum(second, first), high - 1)


@jit()
def _threshold(key, TOPK: tl.constexpr):
    """The lowest kept key, how many keys are kept, and how many of them are above it.

    It fails whenever the range keeps more than half of its keys. Some 8 turns find 2048 of 8192
    scores, where halving the range takes 20.
    """
    low_count = tl.sum((key > _HIDDEN).to(tl.int32))
    high_count = 0
    low = tl.min(tl.where(key > _HIDDEN, key, 0x7FFFFFFF))
    high = tl.max(key) + 1
    kept = tl.minimum(low_count, TOPK)
    failures = 0
    while (low_count > kept) & (high - 1 > low):
        num_keys = low_count - high_count
        first, second = _two_keys(low, high, low_count, high_count, kept, failures)
        # one sum for both: 16 bits hold either
        at_least = (key >= first).to(tl.int32) | ((key >= second).to(tl.int32) << 16)
        found = tl.sum(at_least)
        first_count, second_count = found & 0xFFFF, (found >> 16) & 0xFFFF
        is_first, is_second = first_count >= kept, second_count >= kept
        low = tl.where(is_second, second, tl.where(is_first, first, low))
        low_count = tl.where(is_second, second_count, tl.where(is_first, first_count, low_count))
        high = tl.where(is_second, high, tl.where(is_first, second, first))
        high_count = tl.where(is_second, high_count, tl.where(is_first, second_count, first_count))
        has_failed = 2 * (low_count - high_count) > num_keys
        failures = tl.where(has_failed, failures + 1, 0)
    return low, kept, tl.sum((key > low).to(tl.int32))


@jit()
def _keep_best(
    stretch, positions, first, count, to_keys, to_positions,
    TOPK: tl.constexpr, TOPK_COLUMNS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    IS_FIRST: tl.constexpr, IS_LAST: tl.constexpr,
):  # fmt: skip
    """Write the TOPK best of `count` values of a stretch that begins at column `first`."""
    whole = _keys(stretch, tl.arange(0, SIZE), count, IS_FIRST)
    lowest, kept, above = _threshold(whole, TOPK)
    num_ties = kept - above
    places = 0
    ties = 0
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        key = whole
        if BLOCK < SIZE:
            key = _keys(stretch, index, count, IS_FIRST)
        is_tie = key == lowest
        # one sum for both: 16 bits hold either
        running = tl.cumsum(is_tie.to(tl.int32) | ((key > lowest).to(tl.int32) << 16), 0)
        tie = ties + (running & 0xFFFF)
        place = places + (running >> 16) + tl.minimum(tie, num_ties) - 1
        is_kept = (key > lowest) | (is_tie & (tie <= num_ties))
        position = first + index
        if not IS_FIRST:
            position = tl.load(positions + position, mask=is_kept)
        tl.store(to_positions + place, position, mask=is_kept)
        if not IS_LAST:
            tl.store(to_keys + place, key, mask=is_kept)
        if BLOCK < SIZE:
            ties += tl.sum(is_tie.to(tl.int32))
            places += tl.sum((key > lowest).to(tl.int32))

    place = tl.arange(0, TOPK_COLUMNS)
    is_missing = (place >= kept) & (place < TOPK)
    tl.store(to_positions + place, tl.full((TOPK_COLUMNS,), -1, tl.int32), mask=is_missing)
    if not IS_LAST:
        tl.store(to_keys + place, tl.full((TOPK_COLUMNS,), _HIDDEN, tl.int32), mask=is_missing)


@jit(do_not_specialize=["num_columns"], do_not_specialize_on_alignment=["seen"])
def select_kernel(
    values, positions, seen, kept_keys, kept_positions, kept_seen, num_columns, row_stride,
    TOPK: tl.constexpr, TOPK_COLUMNS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    IS_FIRST: tl.constexpr, IS_LAST: tl.constexpr,
):  # fmt: skip
    """Write the TOPK best of SIZE columns of a row: positions, and keys where not IS_LAST.

    values: fp32 scores [T, num_columns] where IS_FIRST, else keys with their positions; `seen` of
    them count. Output [T, stretches, TOPK]; -1, and the key of -inf, where there are too few;
    nothing for stretches of which no column counts. kept_seen: how many columns of that count.
    """
    chain.after_previous()
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * SIZE
    total = tl.minimum(tl.load(seen + row), num_columns)
    if not IS_LAST:
        tl.store(kept_seen + row, tl.cdiv(total, SIZE) * TOPK, mask=tl.program_id(1) == 0)
    chain.before_next()
    if (total > first) | IS_LAST:
        to = (row * tl.num_programs(1) + tl.program_id(1)) * TOPK
        _keep_best(
            values + row * row_stride + first, positions + row * row_stride, first,
            tl.minimum(total - first, SIZE), kept_keys + to, kept_positions + to,
            TOPK, TOPK_COLUMNS, SIZE, BLOCK, IS_FIRST, IS_LAST,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stretch:
    """How rows are cut; all are powers of two."""

    least: int
    """Columns of a program at least, more than topk."""
    most: int
    """Columns of a program at most; longer rows are cut into as many each."""
    scores_per_thread: int


def stretch_for(num_rows: int, topk: int) -> Stretch:
    """A whole stretch leaves at most a quarter of itself to the next launch."""
    least = 4 * next_power_of_2(topk)
    if num_rows <= FEW_ROWS:
        return Stretch(least, max(least, SHORT_STRETCH), scores_per_thread=16)
    return Stretch(least, max(least, LONG_STRETCH), scores_per_thread=64)


def select(scores: Tensor, topk: int, seen: Tensor, stretch: Stretch) -> Tensor:
    """Launch `select_kernel` until a row is one stretch."""
    num_rows = len(scores)
    values, positions = scores, None
    while True:
        num_columns = values.shape[1]
        size = min(max(next_power_of_2(num_columns), stretch.least), stretch.most)
        num_parts = cdiv(num_columns, size)
        is_last = num_parts == 1
        kept = seen.new_empty(1 if is_last else 2, num_rows, num_parts * topk)
        kept_seen = seen if is_last else seen.new_empty(num_rows)
        select_kernel[(num_rows, num_parts)](
            values,
            values if positions is None else positions,
            seen,
            kept[-1],
            kept[0],
            kept_seen,
            num_columns,
            values.stride(0),
            TOPK=topk,
            TOPK_COLUMNS=next_power_of_2(topk),
            SIZE=size,
            BLOCK=size if size <= SHORT_STRETCH else BLOCK,
            IS_FIRST=positions is None,
            IS_LAST=is_last,
            num_warps=min(32, max(4, size // (32 * stretch.scores_per_thread))),
            **chain.options(),
        )
        if is_last:
            return kept[0]
        (positions, values), seen = kept, kept_seen


def run(scores: Tensor, topk: int, seen: Tensor) -> Tensor:
    """Rising positions, then -1. Columns of `scores` must lie side by side."""
    assert scores.stride(1) == 1
    return select(scores, topk, seen, stretch_for(len(scores), topk))


BACKEND = Backend("triton", run, why_not)
