"""Sums in parts: which tile a program has, and how a tile's parts become one
(docs/decisions/007)."""

from __future__ import annotations

from tetrad.kernels.triton_support import jit, tl

MOST_SPLIT_TILES = 1024
"""Tiles of results, weights times tokens, that may be split; steps with more fill any GPU whole."""


@jit()
def place_of(item, token_tiles, tiles, GROUP: tl.constexpr):
    """Token tile and weight tile of a program; GROUP token tiles share the weights they read."""
    group = item // (GROUP * tiles)
    size = tl.minimum(token_tiles - group * GROUP, GROUP)
    inside = item - group * (GROUP * tiles)
    return group * GROUP + inside % size, inside // size


@jit()
def _sum_of_splits(
    parts, out, factor, row, num_tokens, feature, features,
    BM: tl.constexpr, BF: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Write a tile of `out`: its parts, always added in the same order.

    A few rows at a time, so that the parts of all splits can be on their way at once.
    """
    ROWS: tl.constexpr = 16 if SPLITS > 4 or BM < 32 else 32
    column = feature + tl.arange(0, BF)
    stride = num_tokens.to(tl.int64) * features
    for first in tl.range(0, BM, ROWS):
        token = row + first + tl.arange(0, ROWS)
        at = token.to(tl.int64)[:, None] * features + column[None, :]
        mask = (token < num_tokens)[:, None] & (column < features)[None, :]
        y = tl.zeros((ROWS, BF), tl.float32)
        for split in tl.static_range(SPLITS):
            # past the L1 cache: other multiprocessors wrote this
            part_at = parts + split * stride + at
            y += tl.load(part_at, mask=mask, other=0.0, cache_modifier=".cg")
        tl.store(out + at, (y * factor).to(out.dtype.element_ty), mask=mask)


@jit()
def store_product(
    y, factor, parts, arrived, out, item, split, row, num_tokens, feature, features,
    BM: tl.constexpr, BF: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Write y [BM, BF] times `factor` to out [T, features] from (row, feature) on.

    Where there is more than one split, y is one part of a sum: it goes to parts, fp32
    [SPLITS, T, features], and whoever finds in arrived[item], zero before and after, that all
    others were there adds them up.
    """
    token = row + tl.arange(0, BM)
    column = feature + tl.arange(0, BF)
    at = token.to(tl.int64)[:, None] * features + column[None, :]
    mask = (token < num_tokens)[:, None] & (column < features)[None, :]
    if SPLITS == 1:
        tl.store(out + at, (y * factor).to(out.dtype.element_ty), mask=mask)
    else:
        stride = num_tokens.to(tl.int64) * features
        tl.store(parts + split * stride + at, y, mask=mask)
        # every thread's part before the one thread that counts
        tl.debug_barrier()
        before = tl.atomic_add(arrived + item, 1, sem="acq_rel", scope="gpu")
        if before == SPLITS - 1:
            _sum_of_splits(
                parts, out, factor, row, num_tokens, feature, features, BM, BF, SPLITS
            )  # fmt: skip
            tl.store(arrived + item, 0)
