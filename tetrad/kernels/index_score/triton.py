"""Index scores by tensor cores, straight from the paged cache.

A program takes some rows of the step and a stretch of key positions. Keys are the left operand, a
page at a time; queries times heads are the columns of the product, so that the sum over heads stays
within the threads of one warp. Nothing but the scores is written. FP8 keys become bf16, which is
exact, and their scales multiply the scores.

A row's sequence is found on the device: the launch depends on the numbers of rows, sequences and
keys alone, and a graph of decodes serves any lengths up to its longest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tetrad.core.step import PAGE_TOKENS
from tetrad.kernels import chain
from tetrad.kernels.backend import Backend
from tetrad.kernels.e4m3 import decode
from tetrad.kernels.experts.grouping import cores_of
from tetrad.kernels.ragged import Ragged
from tetrad.kernels.triton_support import cdiv, is_interpreted, jit, next_power_of_2, tl, why_not

PROGRAMS_PER_CORE = 8
"""Rows see different numbers of keys; with a few programs a multiprocessor they even out."""
SCORE_ALIGNMENT = 16
"""Scores a row's length in memory is a multiple of, so that rows are read in whole vectors."""
FILL = 256


@dataclass(frozen=True, slots=True)
class ScoreTile:
    """How one launch is cut."""

    queries: int
    """Rows of a program."""
    stages: int
    """Pages on their way at once, less one."""
    warps: int = 4
    """More than one warp group would have to wait for each other (triton issue 11047)."""


@jit()
def _fill_hidden(
    scores_at, row_mask, start, end, FILL: tl.constexpr,
):  # fmt: skip
    """-inf for the key positions from `start` to below `end`."""
    for at in range(start, end, FILL):
        key = at + tl.arange(0, FILL)
        hidden = tl.full((row_mask.shape[0], FILL), float("-inf"), tl.float32)
        mask = row_mask[:, None] & (key < end)[None, :]
        tl.store(scores_at[:, None] + key[None, :], hidden, mask=mask)


@jit()
def _page_keys(
    pool, page, is_key, depth,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, IS_FP8: tl.constexpr, BY_PTX: tl.constexpr,
):  # fmt: skip
    """Keys [PAGE, depth] of a page, and their scales where they are FP8."""
    slot = tl.arange(0, PAGE)
    mask = is_key[:, None] & (depth < WIDTH)[None, :]
    here = pool + page.to(tl.int64) * (PAGE * (WIDTH + 4 if IS_FP8 else WIDTH))
    keys = tl.load(here + slot[:, None] * WIDTH + depth[None, :], mask=mask, other=0)
    scale = tl.full((PAGE,), 1.0, tl.float32)
    if IS_FP8:
        behind = (here + PAGE * WIDTH).to(tl.pointer_type(tl.float32))
        scale = tl.load(behind + slot, mask=is_key, other=0.0)
        keys = decode(keys, BY_PTX)
    return keys, scale


@jit(
    do_not_specialize=["num_rows", "num_keys", "page_stride"],
    do_not_specialize_on_alignment=["page_table", "sequences", "seen"],
)
def score_kernel(
    queries, weights, pool, page_table, sequences, seen, scores,
    num_rows, num_keys, keys_each, page_stride, weights_stride, scores_stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, HEAD_COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, PAGE: tl.constexpr, FILL: tl.constexpr, ROW_IS_SEQUENCE: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, IS_FP8: tl.constexpr, BY_PTX: tl.constexpr,
):  # fmt: skip
    """scores [T, num_keys] of QUERIES rows for `keys_each` key positions, whole pages.

    sequences: int32 [T], the row's own; not read where ROW_IS_SEQUENCE. seen: int32 [T], keys each
    row sees. HEAD_COLUMNS and DEPTH are HEADS and WIDTH filled up.
    """
    COLUMNS: tl.constexpr = QUERIES * HEAD_COLUMNS
    chain.after_previous()
    row = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    is_row = row < num_rows
    limit = tl.load(seen + row, mask=is_row, other=0)
    owner = row if ROW_IS_SEQUENCE else tl.load(sequences + tl.minimum(row, num_rows - 1))
    scores_at = scores + row.to(tl.int64) * scores_stride
    start = tl.program_id(1) * keys_each
    end = tl.minimum(start + keys_each, num_keys)

    column = tl.arange(0, COLUMNS)
    head = column % HEAD_COLUMNS
    query = tl.program_id(0) * QUERIES + column // HEAD_COLUMNS
    is_column = (query < num_rows) & (head < HEADS)
    at_head = query.to(tl.int64) * HEADS + head
    depth = tl.arange(0, DEPTH)
    is_deep = depth < WIDTH
    q = tl.load(
        queries + at_head[:, None] * WIDTH + depth[None, :],
        mask=is_column[:, None] & is_deep[None, :], other=0.0,
    ).trans()  # fmt: skip
    at_weight = query.to(tl.int64) * weights_stride + head
    weight = tl.load(weights + at_weight, mask=is_column, other=0.0)
    slot = tl.arange(0, PAGE)

    for sequence in range(tl.min(owner), tl.max(owner) + 1):
        is_mine = is_row & (owner == sequence)
        most = tl.max(tl.where(is_mine, limit, 0))
        stop = tl.minimum(end, most)
        pages = page_table + tl.cast(sequence, tl.int64) * page_stride
        page = tl.load(pages + start // PAGE, mask=start < stop, other=0)
        for at in tl.range(start, stop, PAGE, num_stages=STAGES):
            key = at + slot
            k, scale = _page_keys(pool, page, key < most, depth, WIDTH, PAGE, IS_FP8, BY_PTX)
            # by hand, a step ahead: the compiler would wait for keys whenever it waits for a page
            page = tl.load(pages + at // PAGE + 1, mask=at + PAGE < stop, other=0)
            # a NaN has to show in the score
            product = tl.dot(k.to(q.dtype), q, input_precision=PRECISION)
            product = tl.maximum(product, 0.0, propagate_nan=tl.PropagateNan.ALL)
            weighted = (product * weight[None, :]).reshape(PAGE, QUERIES, HEAD_COLUMNS)
            score = tl.sum(weighted, 2)
            if IS_FP8:
                # above 0, so that ReLU may come first
                score = score * scale[:, None]
            score = tl.where(key[:, None] < limit[None, :], score, float("-inf"))
            mask = (key < end)[:, None] & is_mine[None, :]
            tl.store(scores_at[None, :] + key[:, None], score, mask=mask)
        written = tl.maximum(start, tl.cdiv(stop, PAGE) * PAGE)
        _fill_hidden(scores_at, is_mine, written, end, FILL)


def tile_for(num_heads: int, dtype: torch.dtype, is_decode: bool) -> ScoreTile:
    """128 columns, so that two programs fit on a multiprocessor; a row each in a decode.

    A row each in fp32 too, which tensor cores do not multiply exactly.
    """
    if is_decode or dtype == torch.float32:
        return ScoreTile(queries=1, stages=2 if dtype == torch.float32 else 4)
    return ScoreTile(max(1, 128 // head_columns(num_heads)), stages=3)


def head_columns(num_heads: int) -> int:
    """Columns for one query's heads; a product has at least 16."""
    return max(16, next_power_of_2(num_heads))


def keys_each(num_rows: int, num_keys: int, cores: int, tile: ScoreTile) -> int:
    """Key positions of a program, in whole pages."""
    row_tiles = cdiv(num_rows, tile.queries)
    splits = min(cdiv(PROGRAMS_PER_CORE * cores, row_tiles), cdiv(num_keys, PAGE_TOKENS))
    return cdiv(cdiv(num_keys, max(1, splits)), PAGE_TOKENS) * PAGE_TOKENS


def scores(
    queries: Tensor, weights: Tensor, pool: Tensor, ragged: Ragged, tile: ScoreTile, each: int
) -> Tensor:
    """Launch `score_kernel`; `each` from `keys_each`."""
    num_rows, num_heads, width = queries.shape
    num_keys = ragged.max_kv_len
    stride = cdiv(num_keys, SCORE_ALIGNMENT) * SCORE_ALIGNMENT
    out = weights.new_empty(num_rows, stride)
    score_kernel[(cdiv(num_rows, tile.queries), cdiv(num_keys, each))](
        queries,
        weights,
        pool,
        ragged.page_table,
        ragged.seen if ragged.is_decode else ragged.row_sequences,
        ragged.seen,
        out,
        num_rows,
        num_keys,
        each,
        ragged.page_stride,
        weights.stride(0),
        stride,
        HEADS=num_heads,
        WIDTH=width,
        QUERIES=tile.queries,
        HEAD_COLUMNS=head_columns(num_heads),
        DEPTH=max(16, next_power_of_2(width)),
        PAGE=PAGE_TOKENS,
        FILL=FILL,
        ROW_IS_SEQUENCE=ragged.is_decode,
        STAGES=tile.stages,
        PRECISION="ieee" if queries.dtype == torch.float32 else "tf32",
        IS_FP8=pool.dtype == torch.uint8,
        BY_PTX=not is_interpreted(),
        num_warps=tile.warps,
        **chain.options(),
    )
    return out[:, :num_keys]


def run(queries: Tensor, weights: Tensor, pool: Tensor, ragged: Ragged) -> Tensor:
    """One launch, for which the host waits never; `pool` must be contiguous, and the columns of
    `weights` must lie side by side."""
    assert pool.is_contiguous()
    device = queries.device
    num_rows, num_heads, _ = queries.shape
    tile = tile_for(num_heads, queries.dtype, ragged.is_decode)
    each = keys_each(num_rows, ragged.max_kv_len, cores_of(device), tile)
    return scores(queries.contiguous(), weights, pool, ragged, tile, each)


BACKEND = Backend("triton", run, why_not)
