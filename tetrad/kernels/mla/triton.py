"""Latent attention over the paged cache: one kernel for decodes and prompts, dense and selected.

A program attends with one row's heads, a tile of them, to a part of the keys the row reads. A key
is read once and used twice: all of it for the scores, its first C numbers as the value. FP8 keys
become bf16 right after they are loaded, which is exact. Scores go through an online softmax
(Milakov and Gimelshein, 2018; FlashAttention-2 for the order of work).

A step of few rows has fewer programs than the GPU has multiprocessors, so the keys of a row are
split. Every part is written in fp32 with the logarithm of its sum, and a second kernel adds the
parts up in their order (Flash-Decoding). Into how many parts follows from shapes alone, so that a
CUDA graph holds for any lengths; which keys a part has follows from the lengths, on the device.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from tetrad.core.step import PAGE_TOKENS
from tetrad.kernels import chain
from tetrad.kernels.backend import Backend
from tetrad.kernels.e4m3 import BLOCK as FP8_BLOCK
from tetrad.kernels.e4m3 import load_latents
from tetrad.kernels.experts.grouping import cores_of
from tetrad.kernels.mla import reference
from tetrad.kernels.mla.tiles import MlaTile, fitted, splits_for, tile_for
from tetrad.kernels.ragged import Ragged
from tetrad.kernels.triton_support import (
    cdiv,
    constexpr,
    is_interpreted,
    jit,
    next_power_of_2,
    tl,
    why_not,
)

_log = logging.getLogger(__name__)

PAGE = constexpr(PAGE_TOKENS)
LOG2_E = constexpr(1.4426950408889634)
NO_SCORE = constexpr(-1e30)
"""Below any score, yet its difference to itself is a number."""
SEARCHED = constexpr(128)
"""Sequences that the search for a row's own looks at together."""
MIN_DOT = 16
"""The smallest edge of a product."""
COMBINED_NUMBERS = 4096
"""How many numbers one program adds up."""
WARP_BYTES = 32 * 16
"""That a warp reads at once."""


@jit()
def _sequence_of(row, query_start, num_sequences):
    """How many sequences end at or before `row`: its own, or `num_sequences` behind the last."""
    found = 0
    for first in tl.range(0, num_sequences, SEARCHED):
        sequence = first + tl.arange(0, SEARCHED)
        known = sequence < num_sequences
        end = tl.load(query_start + 1 + sequence, mask=known, other=0)
        found += tl.sum((known & (end <= row)).to(tl.int32))
    return found


@jit()
def _place(num_splits, H: tl.constexpr, BH: tl.constexpr):
    """Heads, row, and part of all rows' parts, of a program; heads of a part stand side by side,
    to meet in the L2 cache."""
    HEAD_TILES: tl.constexpr = (H + BH - 1) // BH
    head = tl.program_id(0) % HEAD_TILES * BH + tl.arange(0, BH)
    part = tl.program_id(0) // HEAD_TILES
    return head, part // num_splits, part


@jit()
def _part_of(num_keys, split, num_splits, BT: tl.constexpr):
    """First tile of keys of a part, and the one behind its last."""
    num_tiles = tl.cdiv(num_keys, BT)
    each = tl.cdiv(num_tiles, num_splits)
    return split * each, tl.minimum(split * each + each, num_tiles)


@jit()
def _seen_by(
    row, query_start, kv_lens, page_table, page_stride, num_sequences, ONE_EACH: tl.constexpr
):
    """How many keys a row sees, and where its pages stand."""
    sequence = row if ONE_EACH else _sequence_of(row, query_start, num_sequences)
    is_owned = sequence < num_sequences
    kv_len = tl.load(kv_lens + sequence, mask=is_owned, other=0)
    end = tl.load(query_start + sequence + 1, mask=is_owned, other=0)
    seen = tl.where(kv_len > 0, kv_len - end + row + 1, 0)
    return seen, page_table + sequence.to(tl.int64) * page_stride


@jit()
def _resolve(chosen, slots, pages, seen, TOPK: tl.constexpr, TOPK_PADDED: tl.constexpr):
    """Write where a row's selected keys lie, -1 for none, so that the loop looks up one thing and
    not two in a row. Returns the number of entries up to the last key.

    Every program of the row writes the same, and reads what it has written itself.
    """
    entry = tl.arange(0, TOPK_PADDED)
    position = tl.load(chosen + entry, mask=entry < TOPK, other=-1)
    is_key = (position >= 0) & (position < seen)
    page = tl.load(pages + position // PAGE, mask=is_key, other=0)
    slot = tl.where(is_key, page * PAGE + position % PAGE, -1)
    tl.store(slots + entry, slot, mask=entry < TOPK)
    tl.debug_barrier()
    return tl.max(tl.where(is_key, entry + 1, 0))


@jit()
def _columns(base, is_row, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """[row, column]: WIDTH numbers from each address on, zeros where there is no row."""
    column = tl.arange(0, PADDED)
    mask = is_row[:, None]
    if WIDTH < PADDED:
        mask = mask & (column < WIDTH)[None, :]
    return tl.load(base[:, None] + column[None, :], mask=mask, other=0.0)


@jit()
def _keys(
    pool, slot, is_key, C: tl.constexpr, R: tl.constexpr, C_PADDED: tl.constexpr,
    R_PADDED: tl.constexpr, IS_FP8: tl.constexpr, BY_PTX: tl.constexpr,
):  # fmt: skip
    """Latents and rotary keys of some slots. What no row names is not read: it may be anything."""
    if IS_FP8:
        CODES: tl.constexpr = C + (C + FP8_BLOCK - 1) // FP8_BLOCK * 4
        key = pool + slot.to(tl.int64) * (CODES + 2 * R)
        latent = load_latents(key, is_key, C, C_PADDED, BY_PTX)
        behind = (key + CODES).to(tl.pointer_type(tl.bfloat16))
        rotary = _columns(behind, is_key, R, R_PADDED).to(latent.dtype)
    else:
        key = pool + slot.to(tl.int64) * (C + R)
        latent = _columns(key, is_key, C, C_PADDED)
        rotary = _columns(key + C, is_key, R, R_PADDED)
    return latent, rotary


@jit()
def _fold(scores, value, largest, total, acc):
    """One step of the online softmax: scores, in powers of two, and values of further keys."""
    raised = tl.maximum(largest, tl.max(scores, 1))
    weights = tl.exp2(scores - raised[:, None])
    shrink = tl.exp2(largest - raised)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None])
    return raised, total, acc


@jit(
    do_not_specialize=["page_stride", "num_sequences", "num_splits"],
    do_not_specialize_on_alignment=["query_start", "kv_lens", "page_table"],
)
def attend_kernel(
    queries, pool, selected, slots, query_start, kv_lens, page_table, out, log_sums, scale,
    page_stride, num_sequences, num_splits,
    H: tl.constexpr, C: tl.constexpr, R: tl.constexpr, TOPK: tl.constexpr,
    ONE_EACH: tl.constexpr, IS_SPLIT: tl.constexpr, C_PADDED: tl.constexpr,
    R_PADDED: tl.constexpr, TOPK_PADDED: tl.constexpr, BH: tl.constexpr, BT: tl.constexpr,
    STAGES: tl.constexpr, IS_FP8: tl.constexpr, BY_PTX: tl.constexpr,
):  # fmt: skip
    """Attend with BH heads of one row to one part of its keys; TOPK 0: to all it sees.

    out: [T, H, C], or fp32 parts [T, num_splits, H, C] beside log_sums fp32 [T, num_splits, H]: of
    a part without keys only the latter, -inf, is written. slots: scratch like `selected`.
    ONE_EACH: row s belongs to sequence s.
    """
    chain.after_previous()
    head, row, part = _place(num_splits, H, BH)
    seen, pages = _seen_by(
        row, query_start, kv_lens, page_table, page_stride, num_sequences, ONE_EACH
    )
    num_keys = seen
    slots += row.to(tl.int64) * TOPK
    if TOPK > 0:
        chosen = selected + row.to(tl.int64) * TOPK
        num_keys = _resolve(chosen, slots, pages, seen, TOPK, TOPK_PADDED)
    first_tile, last_tile = _part_of(num_keys, part % num_splits, num_splits, BT)

    query = queries + (row.to(tl.int64) * H + head) * (C + R)
    q_latent = _columns(query, head < H, C, C_PADDED)
    q_rotary = _columns(query + C, head < H, R, R_PADDED)
    largest = tl.full((BH,), NO_SCORE, tl.float32)
    total = tl.zeros((BH,), tl.float32)
    acc = tl.zeros((BH, C_PADDED), tl.float32)
    for tile in tl.range(first_tile, last_tile, num_stages=STAGES):
        entry = tile * BT + tl.arange(0, BT)
        if TOPK > 0:
            slot = tl.load(slots + entry, mask=entry < TOPK, other=-1)
            is_key = slot >= 0
        else:
            slot = tl.load(pages + tile * BT // PAGE) * PAGE + entry % PAGE
            is_key = entry < seen
        latent, rotary = _keys(pool, slot, is_key, C, R, C_PADDED, R_PADDED, IS_FP8, BY_PTX)
        scores = tl.dot(q_rotary, rotary.T, tl.dot(q_latent, latent.T))
        scores = tl.where(is_key[None, :], scores * (scale * LOG2_E), -float("inf"))
        largest, total, acc = _fold(scores, latent, largest, total, acc)

    # A row that reads nothing gives zeros.
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    at = row.to(tl.int64) * H + head
    if IS_SPLIT:
        at = part.to(tl.int64) * H + head
        log_sum = tl.where(is_empty, -float("inf"), largest + tl.log2(total))
        tl.store(log_sums + at, log_sum, mask=head < H)
    chain.before_next()
    if not IS_SPLIT or first_tile < last_tile:
        column = tl.arange(0, C_PADDED)
        result = (acc * (1.0 / total)[:, None]).to(out.dtype.element_ty)
        mask = (head < H)[:, None] & (column < C)[None, :]
        tl.store(out + at[:, None] * C + column[None, :], result, mask=mask)


@jit(do_not_specialize=["num_splits"])
def combine_kernel(
    parts, log_sums, out, num_splits,
    H: tl.constexpr, C: tl.constexpr, SPLITS_PADDED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One head of one row: the parts, weighted by their share of the sum, in a fixed order."""
    chain.after_previous()
    row = (tl.program_id(0) // H).to(tl.int64)
    head = tl.program_id(0) % H
    split = tl.arange(0, SPLITS_PADDED)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = (row * num_splits + split) * H + head
    log_sum = tl.load(log_sums + at, mask=split < num_splits, other=-float("inf"))
    is_written = log_sum != -float("inf")
    largest = tl.maximum(tl.max(log_sum, 0), NO_SCORE)
    weight = tl.exp2(log_sum - largest)
    total = tl.sum(weight, 0)
    mask = is_written[:, None] & (column < C)[None, :]
    part = tl.load(parts + at[:, None] * C + column[None, :], mask=mask, other=0.0).to(tl.float32)
    result = tl.sum(part * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    at = out + tl.program_id(0).to(tl.int64) * C + column
    chain.before_next()
    tl.store(at, result.to(out.dtype.element_ty), mask=column < C)


def attend(
    queries: Tensor,
    pool: Tensor,
    ragged: Ragged,
    selected: Tensor | None,
    scale: float,
    latent_rank: int,
    tile: MlaTile,
    num_splits: int,
) -> Tensor:
    """Launch `attend_kernel`, and for parts `combine_kernel` too; `tile` fits the device."""
    num_rows, num_heads, width = queries.shape
    num_sequences = len(ragged.page_table)
    topk = 0 if selected is None else selected.shape[1]
    # Without a selection nothing is read there.
    chosen = pool if selected is None else selected.contiguous()
    out, parts, log_sums = outputs(queries, latent_rank, num_splits, torch.float32)
    assert pool.is_contiguous()
    attend_kernel[(num_rows * num_splits * cdiv(num_heads, tile.heads),)](
        queries.contiguous(),
        pool,
        chosen,
        chosen if selected is None else torch.empty_like(chosen),
        ragged.query_start,
        ragged.kv_lens,
        ragged.page_table,
        parts,
        log_sums,
        scale,
        ragged.page_stride,
        num_sequences,
        num_splits,
        H=num_heads,
        C=latent_rank,
        R=width - latent_rank,
        TOPK=topk,
        ONE_EACH=num_sequences == num_rows,
        IS_SPLIT=num_splits > 1,
        C_PADDED=padded(latent_rank),
        R_PADDED=padded(width - latent_rank),
        TOPK_PADDED=next_power_of_2(topk),
        BH=tile.heads,
        BT=tile.keys,
        STAGES=tile.stages,
        IS_FP8=pool.dtype == torch.uint8,
        BY_PTX=not is_interpreted(),
        num_warps=tile.warps,
        **chain.options(),
    )
    if num_splits > 1:
        combine(parts, log_sums, out)
    return out


def outputs(
    queries: Tensor, latent_rank: int, num_splits: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and what the first kernel writes: parts of a type and the logarithms of their
    sums, or, with one part, the result itself."""
    num_rows, num_heads, _ = queries.shape
    out = queries.new_empty(num_rows, num_heads, latent_rank)
    if num_splits == 1:
        return out, out, out
    shape = (num_rows, num_splits, num_heads)
    parts = queries.new_empty(*shape, latent_rank, dtype=dtype)
    return out, parts, queries.new_empty(*shape, dtype=torch.float32)


def combine(parts: Tensor, log_sums: Tensor, out: Tensor) -> None:
    """Add up parts [T, splits, H, C]."""
    num_rows, num_splits, num_heads, rank = parts.shape
    splits = next_power_of_2(num_splits)
    columns = min(next_power_of_2(rank), COMBINED_NUMBERS // splits)
    # A thread reads 16 bytes of each part. With more threads they would share the parts, and add up
    # in shared memory, which takes three times as long.
    warps = max(1, columns * parts.element_size() // WARP_BYTES)
    combine_kernel[(num_rows * num_heads, cdiv(rank, columns))](
        parts,
        log_sums,
        out,
        num_splits,
        H=num_heads,
        C=rank,
        SPLITS_PADDED=splits,
        COLUMNS=columns,
        num_warps=warps,
        **chain.options(),
    )


def padded(width: int) -> int:
    """Columns of a tile that holds `width`."""
    return max(MIN_DOT, next_power_of_2(width))


def splits_of(tile: MlaTile, queries: Tensor, ragged: Ragged, selected: Tensor | None) -> int:
    """Into how many parts to split the keys of a call's rows."""
    most_keys = ragged.page_table.shape[1] * PAGE_TOKENS
    if selected is not None:
        most_keys = min(most_keys, selected.shape[1])
    num_rows, num_heads, _ = queries.shape
    return splits_for(tile, num_rows, num_heads, most_keys, cores_of(queries.device))


@functools.cache
def _tell_once(reason: str) -> None:
    _log.warning("Attention runs on plain torch, many times slower: %s.", reason)


def run(
    queries: Tensor,
    pool: Tensor,
    ragged: Ragged,
    selected: Tensor | None,
    scale: float,
    latent_rank: int,
) -> Tensor:
    """One launch or two, for which the host never waits. Of `ragged` only tensors are read."""
    if queries.dtype != torch.bfloat16:
        _tell_once(f"activations are {str(queries.dtype).removeprefix('torch.')} and not bfloat16")
        return reference.run(queries, pool, ragged, selected, scale, latent_rank)
    _, num_heads, width = queries.shape
    capability = torch.cuda.get_device_capability(queries.device)
    wide = padded(latent_rank) + padded(width - latent_rank)
    tile = tile_for(num_heads, capability, pool.dtype == torch.uint8)
    tile = fitted(tile, wide, capability)
    splits = splits_of(tile, queries, ragged, selected)
    return attend(queries, pool, ragged, selected, scale, latent_rank, tile, splits)


BACKEND = Backend("triton", run, why_not)
