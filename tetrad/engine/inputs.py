"""A step's plan as the tensors a model reads."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tetrad.core.plan import Decodes, Ints, PageTable, StepPlan
from tetrad.core.step import IN_PAGE, PAGE_BITS, PAGE_TOKENS, SequenceWork
from tetrad.engine.blocks import pages_for
from tetrad.engine.transfer import send_into, to_device
from tetrad.layers.batch import ForwardBatch

NOTHING = torch.zeros(1, dtype=torch.int64)
ALIGNED = 4
"""Numbers of 4 bytes: kernels compiled for page tables on 16 bytes are not for others."""


def as_read(nothing: Tensor, ids: Tensor) -> Tensor:
    """[1 + R] the tokens of a step [R] as the next one reads them: behind `nothing`, which is
    NOTHING on their device."""
    return torch.cat([nothing, ids])


def put_sampled(token_ids: Tensor, sources: Tensor, sampled: Tensor) -> None:
    """In `token_ids` [T], 0 where the host does not know one, put what `sources` [T] point at in
    `sampled`, see `as_read`; they are 0 elsewhere. The larger of both takes fewer launches than to
    choose, and is 0 for who had no finite logits, -1, and ends."""
    torch.maximum(token_ids, sampled.index_select(0, sources), out=token_ids)


@dataclass(frozen=True, slots=True)
class Columns:
    """A plan of S sequences and T tokens as arrays on the host."""

    token_ids: Ints
    """[T], pending ones negative."""
    starts: Ints
    """[S] the position of each one's first token."""
    ends: Ints
    """[S] where among all tokens its own end."""
    kv_lens: Ints
    """[S]."""
    page_table: PageTable
    """[S, n], padded with 0."""
    num_decodes: int
    """Of the sequences, those that come first and have one token."""

    @classmethod
    def of(cls, plan: StepPlan) -> Columns:
        """Decodes are columns already; the others are put behind them."""
        works, decodes, first = plan.sequences, plan.decodes, len(plan.decodes)
        ends, kv_lens = np.arange(1, first + 1), decodes.starts + 1
        if not works:
            table = decodes.page_table
            return cls(decodes.token_ids, decodes.starts, ends, kv_lens, table, first)
        ids = np.frombuffer(b"".join([work.token_ids for work in works]), np.int32)
        lens = np.array([len(work.token_ids) for work in works])
        starts = np.array([work.start for work in works])
        kv_lens = np.concatenate([kv_lens, starts + lens])
        return cls(
            np.concatenate([decodes.token_ids, ids]),
            np.concatenate([decodes.starts, starts]),
            np.concatenate([ends, first + lens.cumsum()]),
            kv_lens,
            _page_table(decodes, works, pages_for(int(kv_lens.max()))),
            first,
        )

    def place(self, positions: Ints, slots: Ints) -> None:
        """Write where each token stands, [T], and where its key is kept, [T]."""
        first, size = self.num_decodes, len(self.kv_lens)
        positions[:first] = self.starts[:first]
        cells = np.arange(0, size * self.page_table.shape[1], self.page_table.shape[1])
        if first < size:
            own_ends = self.ends[first:]
            lens = self.kv_lens[first:] - self.starts[first:]
            positions[first:] = (self.kv_lens[first:] - own_ends).repeat(lens)
            positions[first:] += np.arange(first, len(positions))
            cells = np.concatenate([cells[:first], cells[first:].repeat(lens)])
        cells += positions >> PAGE_BITS
        slots[:] = self.page_table.take(cells)
        slots <<= PAGE_BITS
        slots |= positions & IN_PAGE

    def read(self, token_ids: Ints, sources: Ints) -> None:
        """Write what `put_sampled` takes, of as many tokens as each has room for."""
        np.maximum(self.token_ids, 0, out=token_ids)
        np.maximum(-self.token_ids[: len(sources)], 0, out=sources)


def _page_table(decodes: Decodes, works: tuple[SequenceWork, ...], width: int) -> PageTable:
    first = len(decodes)
    table = np.zeros((first + len(works), width), np.int32)
    table[:first, : decodes.page_table.shape[1]] = decodes.page_table
    for row, work in enumerate(works, first):
        pages = work.pages[:width]
        table[row, : len(pages)] = array("i", pages)  # read in half the time
    return table


class StaticInputs:
    """The tensors that one recorded decode step of B rows reads, filled before each replay.

    Rows that no sequence needs are padding: token 0 at position 0 of the scratch page.
    """

    def __init__(self, page_table: Tensor, scratch_page: int, most_kv_tokens: int) -> None:
        """`page_table` [B, max_pages] int32 may be shared by steps, as one runs at a time."""
        size, device = len(page_table), page_table.device
        self.size = size
        self.page_table = page_table
        self._scratch_page = scratch_page
        self._most_kv_tokens = most_kv_tokens
        self._longs = torch.zeros(4 * size + 2 + (size + 1) // 2, dtype=torch.int64, device=device)
        """Token ids, positions, slots and sources, see `put_sampled`; how many are no padding and a
        number that aligns what follows; then `kv_lens`."""
        self._host = np.zeros(self._longs.shape, np.int64)
        """The same; it is filled anew when what it held is in pinned memory already."""
        self._padding = np.array([[0], [0], [scratch_page * PAGE_TOKENS], [0]])
        """What each row of `_longs` has for rows that are padding."""
        self._kv_lens = self._longs[4 * size + 2 :].view(torch.int32)[:size].fill_(1)
        self._query_start = torch.arange(size + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(size, device=device)
        self._longs[2 * size : 3 * size] = scratch_page * PAGE_TOKENS
        page_table[:, 0] = scratch_page

    def batch(self) -> ForwardBatch:
        """The step, anew for each use: what a batch derives from its tensors it keeps, and a
        recording must compute it anew."""
        token_ids, positions, slots, _ = self._longs[: 4 * self.size].view(4, self.size)
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            query_start=self._query_start,
            kv_lens=self._kv_lens,
            page_table=self.page_table,
            logit_rows=self._rows,
            query_lens=(1,) * self.size,
            kv_lens_host=(self._most_kv_tokens,) * self.size,
            num_real=self._longs[4 * self.size : 4 * self.size + 1],
        )

    def fill(self, plan: StepPlan, sampled: Tensor = NOTHING) -> None:
        """Write a step of single tokens, at most B of them. `sampled`: see `as_read`."""
        columns, count, size = Columns.of(plan), plan.num_rows, self.size
        longs = self._host
        by_token = longs[: 4 * size].reshape(4, size)
        token_ids, positions, slots, sources = by_token[:, :count]
        columns.read(token_ids, sources)
        columns.place(positions, slots)
        by_token[:, count:] = self._padding
        longs[4 * size] = count
        kv_lens = longs[4 * size + 2 :].view(np.int32)
        kv_lens[:count], kv_lens[count:] = columns.kv_lens, 1
        page_table = columns.page_table
        if count < size:
            page_table = np.zeros((size, page_table.shape[1]), np.int32)
            page_table[count:, 0] = self._scratch_page
            page_table[:count] = columns.page_table
        send_into(torch.from_numpy(longs), self._longs)
        send_into(torch.from_numpy(page_table), self.page_table[:, : page_table.shape[1]])
        if columns.token_ids.min() < 0:
            put_sampled(self._longs[:size], self._longs[3 * size : 4 * size], sampled)


def build(plan: StepPlan, device: torch.device, sampled: Tensor = NOTHING) -> ForwardBatch:
    """A plan as a batch on `device`. All numbers travel in one copy. `sampled`: see `as_read`."""
    columns, first, size = Columns.of(plan), len(plan.decodes), plan.num_rows
    rows = [row for row, work in enumerate(plan.sequences, first) if work.sample]
    pending = (columns.token_ids < 0).nonzero()[0]
    num_tokens, num_pending = len(columns.token_ids), int(pending[-1]) + 1 if len(pending) else 0
    table = columns.page_table
    num_cells = -(-table.size // ALIGNED) * ALIGNED
    lens = (num_tokens, num_tokens, num_tokens, first + len(rows), num_pending)
    num_longs = -(-sum(lens) // ALIGNED) * ALIGNED
    longs = np.empty(num_longs + (num_cells + 2 * size + 2) // 2, np.int64)
    token_ids, positions, slots = longs[: 3 * num_tokens].reshape(3, num_tokens)
    logit_rows, sources = longs[3 * num_tokens :][: lens[3]], longs[sum(lens[:4]) : sum(lens)]
    columns.read(token_ids, sources)
    columns.place(positions, slots)
    logit_rows[:first], logit_rows[first:] = columns.ends[:first], columns.ends[rows]
    logit_rows -= 1
    ints = longs[num_longs:].view(np.int32)
    ints[: table.size] = table.reshape(-1)
    ints[num_cells] = 0
    ints[num_cells + 1 : num_cells + size + 1] = columns.ends
    ints[num_cells + size + 1 : num_cells + 2 * size + 1] = columns.kv_lens
    moved = to_device(torch.from_numpy(longs), device)
    ids, places, keys, wanted, origins, _, short = moved.split_with_sizes(
        (*lens, num_longs - sum(lens), len(longs) - num_longs)
    )
    cells, query_start, kv_lens, _ = short.view(torch.int32).split_with_sizes(
        (num_cells, size + 1, size, len(ints) - num_cells - 2 * size - 1)
    )
    if num_pending:
        put_sampled(ids[:num_pending], origins, sampled)
    return ForwardBatch(
        token_ids=ids,
        positions=places,
        slots=keys,
        query_start=query_start,
        kv_lens=kv_lens,
        page_table=cells[: table.size].view(table.shape),
        logit_rows=wanted,
        query_lens=(1,) * first + tuple([len(work.token_ids) for work in plan.sequences]),
        kv_lens_host=array("q", columns.kv_lens.tobytes()),
    )
