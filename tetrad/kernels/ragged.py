"""Which cached tokens each query row of a step may see.

A step holds S sequences of different lengths. A kernel reads that from `query_start`, `kv_lens` and
`page_table` directly. Plain torch needs rectangles, so `Ragged.blocks` cuts the step into a few
padded ones, once per step for all layers and ops: single-token rows together, prompt chunks with
others of about their length, none larger than `MAX_BLOCK_PAIRS` (query, key) pairs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from tetrad.core.step import PAGE_TOKENS

MAX_BLOCK_PAIRS = 1 << 20
"""Bounds the score matrix of one block: 2**20 pairs x 64 heads x 4 bytes = 256 MiB."""

MAX_PART_PAIRS = 1 << 26
"""Bounds the scores that are held at once: 256 MiB in fp32."""

_FREE_PADDING_PAIRS = 1 << 14
"""Padding below this many pairs costs less than one more block of small torch calls."""


@dataclass(frozen=True)
class Block:
    """A padded rectangle of G query runs with Q rows each, seeing M keys each."""

    rows: Tensor
    """[G, Q] int64, row of the step; padded rows repeat the run's first row."""
    slots: Tensor
    """[G, M] int64, cache slot of key position m; positions past the run's last key repeat it, so
    that only written slots are ever read."""
    hidden: Tensor
    """[G, Q, M] bool, true where row q does not see key m."""
    is_whole: bool
    """The block is the whole step in order, one row a sequence: nothing to gather or scatter."""
    kept: Tensor | None
    """[n] int64 into the flattened [G * Q] rows: those that are not padding. None: all of them."""

    is_masked: bool
    """Does a row not see all M keys?"""

    def mask(self, heads: int) -> Tensor | None:
        """bool [G, 1, heads * Q, M], true where a row sees a key, for heads that lie one above the
        other; None if every row sees all."""
        if not self.is_masked:
            return None
        if heads not in self._masks:
            seen = ~self.hidden.unsqueeze(1)
            self._masks[heads] = seen.repeat(1, heads, 1, 1).flatten(1, 2).unsqueeze(1)
        return self._masks[heads]

    @cached_property
    def _masks(self) -> dict[int, Tensor]:
        """All layers ask for the same."""
        return {}

    def gather(self, values: Tensor) -> Tensor:
        """Rows of `values` [T, ...] as [G, Q, ...]."""
        return values.unsqueeze(1) if self.is_whole else values[self.rows]

    def scatter(self, values: Tensor, out: Tensor) -> None:
        """Write `values` [G, Q, ...] to the rows of `out` [T, ...] they belong to."""
        flat, rows = values.flatten(0, 1), self.rows.flatten()
        if self.kept is not None:
            flat, rows = flat[self.kept], rows[self.kept]
        out[rows] = flat


@dataclass(frozen=True)
class _Run:
    """Consecutive query rows of one sequence."""

    sequence: int
    row: int
    num_rows: int
    num_keys: int
    """Keys the last row sees; the row before it sees one fewer, and so on."""


@dataclass(frozen=True)
class Ragged:
    """The lengths and pages of the sequences of one step.

    Row `query_start[s] + i` of sequence s stands at position `kv_lens[s] - query_lens[s] + i` and
    sees the keys at positions 0 up to its own. A sequence of kv_len 0 only fills up a batch.
    """

    query_start: Tensor
    """[S + 1] int32."""
    kv_lens: Tensor
    """[S] int32, tokens in the cache once this step's keys are written."""
    page_table: Tensor
    """[S, max_pages] int32."""
    query_lens: tuple[int, ...]
    """Host twin of the differences of `query_start`."""
    kv_lens_host: Sequence[int]
    """Host twin of `kv_lens`."""

    @cached_property
    def max_kv_len(self) -> int:
        return max(self.kv_lens_host)

    @property
    def page_stride(self) -> int:
        """Numbers from one sequence's pages to the next one's; pages of one lie side by side."""
        one, between = self.page_table.shape[1] == 1, self.page_table.stride()
        assert one or between[1] == 1, between
        return between[0]

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The step as padded rectangles; every row that sees a key is in exactly one."""
        groups = _pack(_runs(self.query_lens, self.kv_lens_host))
        return tuple(self._block(group) for group in groups)

    @cached_property
    def row_pages(self) -> Tensor:
        """[T, max_pages] int64: the page table of each row's sequence, times PAGE_TOKENS."""
        pages = self.page_table.long() * PAGE_TOKENS
        if all(n == 1 for n in self.query_lens):
            return pages
        repeats = torch.tensor(self.query_lens, device=pages.device)
        return pages.repeat_interleave(repeats, dim=0, output_size=sum(self.query_lens))

    @cached_property
    def is_decode(self) -> bool:
        """Has each sequence one row?"""
        return all(n == 1 for n in self.query_lens)

    @cached_property
    def row_sequences(self) -> Tensor:
        """[T] int32: the sequence each row belongs to."""
        row = torch.arange(
            sum(self.query_lens), dtype=self.query_start.dtype, device=self.query_start.device
        )
        return torch.searchsorted(self.query_start[1:], row, right=True, out_int32=True)

    @cached_property
    def seen(self) -> Tensor:
        """[T] int32: how many keys each row sees."""
        if self.is_decode:
            return self.kv_lens
        owner = self.row_sequences
        row = torch.arange(len(owner), dtype=torch.int32, device=owner.device)
        return (self.kv_lens - self.query_start[1:])[owner] + row + 1

    @cached_property
    def parts(self) -> tuple[tuple[slice, Ragged], ...]:
        """Which rows, with their lengths and pages, of each part of the step.

        No part of several rows has more than MAX_PART_PAIRS (row, key) pairs. Usually there is one,
        the step itself.
        """
        num_rows = sum(self.query_lens)
        size = max(1, MAX_PART_PAIRS // self.max_kv_len)
        if size >= num_rows:
            return ((slice(0, num_rows), self),)
        cuts = [(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]
        return tuple((slice(*cut), self._part(*cut)) for cut in cuts)

    def _part(self, start: int, end: int) -> Ragged:
        """Rows `start` to below `end`; what they do not see is no longer there."""
        ends = list(accumulate(self.query_lens))
        first, last = bisect_right(ends, start), bisect_left(ends, end) + 1
        lens = range(first, last)
        kv_lens = self.kv_lens[first:last]
        if (
            not self.is_decode
        ):  # else left in place, for graphs that are replayed with other lengths
            kv_lens = kv_lens - (self.query_start[first + 1 : last + 1] - end).clamp(min=0)
        return Ragged(
            query_start=self.query_start[first : last + 1].clamp(start, end) - start,
            kv_lens=kv_lens,
            page_table=self.page_table[first:last],
            query_lens=tuple(
                min(ends[s], end) - max(ends[s] - self.query_lens[s], start) for s in lens
            ),
            kv_lens_host=tuple(self.kv_lens_host[s] - max(0, ends[s] - end) for s in lens),
        )

    def row_slots(self, positions: Tensor) -> Tensor:
        """Cache slots of key `positions` [T, N] (>= 0), each in its row's sequence. [T, N]."""
        return self.row_pages.gather(1, positions // PAGE_TOKENS) + positions % PAGE_TOKENS

    def _block(self, runs: list[_Run]) -> Block:
        device = self.page_table.device
        num_rows = max(run.num_rows for run in runs)
        num_keys = max(run.num_keys for run in runs)
        # One transfer for all of the block's small integers.
        table = torch.tensor(
            [(r.sequence, r.row, r.num_rows, r.num_keys) for r in runs], device=device
        )
        sequence, row, rows_each, keys_each = table.unsqueeze(-1).unbind(1)
        query = torch.arange(num_rows, device=device)
        key = torch.arange(num_keys, device=device)
        position = key.minimum(keys_each - 1)
        pages = self.page_table[sequence.squeeze(1)].long()
        slots = pages.gather(1, position // PAGE_TOKENS) * PAGE_TOKENS + position % PAGE_TOKENS
        is_row = query < rows_each
        last_key = (keys_each - rows_each + query).minimum(keys_each - 1)
        hidden = key > last_key.unsqueeze(-1)
        is_padded = any(run.num_rows != num_rows for run in runs)
        return Block(
            rows=torch.where(is_row, row + query, row),
            slots=slots,
            hidden=hidden,
            is_whole=num_rows == 1 and [r.row for r in runs] == list(range(sum(self.query_lens))),
            kept=is_row.flatten().nonzero().squeeze(1) if is_padded else None,
            is_masked=num_rows > 1 or any(run.num_keys != num_keys for run in runs),
        )


def _runs(query_lens: tuple[int, ...], kv_lens: Sequence[int]) -> list[_Run]:
    """Cut long prompt chunks so that no run alone exceeds MAX_BLOCK_PAIRS; rows that see nothing
    are left out."""
    runs, row = [], 0
    for sequence, (query_len, kv_len) in enumerate(zip(query_lens, kv_lens, strict=True)):
        if kv_len == 0:
            row += query_len
            continue
        step = max(1, MAX_BLOCK_PAIRS // kv_len)
        for start in range(0, query_len, step):
            count = min(step, query_len - start)
            runs.append(_Run(sequence, row + start, count, kv_len - query_len + start + count))
        row += query_len
    return runs


def _pack(runs: list[_Run]) -> list[list[_Run]]:
    """Group runs of like length: padding at most doubles the pairs of a group."""
    groups: list[list[_Run]] = []
    useful = 0
    for run in sorted(runs, key=lambda r: r.num_rows):
        pairs = run.num_rows * run.num_keys
        if groups:
            group = [*groups[-1], run]
            padded = len(group) * run.num_rows * max(r.num_keys for r in group)
            is_cheap = padded <= max(2 * (useful + pairs), _FREE_PADDING_PAIRS)
            if is_cheap and padded <= MAX_BLOCK_PAIRS:
                groups[-1].append(run)
                useful += pairs
                continue
        groups.append([run])
        useful = pairs
    return groups
