"""A step's plan as the tensors a model reads."""

from __future__ import annotations

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


def as_read(nothing: Tensor, ids: Tensor) -> Tensor:
    """[1 + R] the tokens of a step [R] as the next one reads them, behind `nothing`, which is
    NOTHING on their device. Where logits were not finite, -1, it reads 0 as well, since that
    request ends."""
    return torch.cat([nothing, ids.clamp(min=0)])


def put_sampled(token_ids: Tensor, sampled: Tensor) -> None:
    """In `token_ids` [T], put token r of `sampled`, see `as_read`, for each -1 - r. Who is known
    reads the 0, which is no larger: that takes the host fewer launches than to choose."""
    found = sampled.index_select(0, (-token_ids).clamp_(min=0))
    torch.maximum(token_ids, found, out=token_ids)


@dataclass(frozen=True, slots=True)
class Columns:
    """A plan of S sequences and T tokens as arrays on the host."""

    query_lens: Ints
    """[S]."""
    kv_lens: Ints
    """[S]."""
    page_table: PageTable
    """[S, n], padded with 0."""
    token_ids: Ints
    """[T], pending ones negative."""
    positions: Ints
    """[T]."""
    slots: Ints
    """[T]."""

    @classmethod
    def of(cls, plan: StepPlan) -> Columns:
        """Decodes are columns already; the others are put behind them."""
        works, decodes = plan.sequences, plan.decodes
        if not works:
            starts, rows = decodes.starts, np.arange(len(decodes))
            slots = _slots(decodes.page_table, rows, starts)
            ones = np.ones_like(starts)
            return cls(ones, starts + 1, decodes.page_table, decodes.token_ids, starts, slots)
        first = len(decodes)
        query_lens = np.ones(plan.num_rows, np.int64)
        query_lens[first:] = lens = np.array([len(work.token_ids) for work in works])
        starts = np.array([work.start for work in works])
        ids = np.frombuffer(b"".join(work.token_ids for work in works), np.int32)
        kv_lens = np.concatenate([decodes.starts, starts]) + query_lens
        page_table = _page_table(decodes, works, pages_for(int(kv_lens.max())))
        own_rows = np.arange(len(works)).repeat(lens)
        own_positions = np.arange(len(ids)) + (starts + lens - lens.cumsum()).take(own_rows)
        rows = np.concatenate([np.arange(first), own_rows + first])
        positions = np.concatenate([decodes.starts, own_positions])
        return cls(
            query_lens,
            kv_lens,
            page_table,
            np.concatenate([decodes.token_ids, ids]),
            positions,
            _slots(page_table, rows, positions),
        )


def _slots(page_table: PageTable, rows: Ints, positions: Ints) -> Ints:
    """Where the key of each of `positions` [T], of `rows` [T] of the table, is kept."""
    cells = rows * page_table.shape[1] + (positions >> PAGE_BITS)
    slots: Ints = page_table.take(cells).astype(np.int64) << PAGE_BITS
    slots |= positions & IN_PAGE
    return slots


def _page_table(decodes: Decodes, works: tuple[SequenceWork, ...], width: int) -> PageTable:
    first = len(decodes)
    table = np.zeros((first + len(works), width), np.int32)
    table[:first, : decodes.page_table.shape[1]] = decodes.page_table
    for row, work in enumerate(works, first):
        pages = work.pages[:width]
        table[row, : len(pages)] = pages
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
        self._longs = torch.zeros(3 * size + 1, dtype=torch.int64, device=device)
        self._kv_lens = torch.ones(size, dtype=torch.int32, device=device)
        self._query_start = torch.arange(size + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(size, device=device)
        self._longs[2 * size : 3 * size] = scratch_page * PAGE_TOKENS
        page_table[:, 0] = scratch_page

    def batch(self) -> ForwardBatch:
        """The step, anew for each use: what a batch derives from its tensors it keeps, and a
        recording must compute it anew."""
        token_ids, positions, slots = self._longs[:-1].view(3, self.size)
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
            num_real=self._longs[-1:],
        )

    def fill(self, plan: StepPlan, sampled: Tensor = NOTHING) -> None:
        """Write a step of single tokens, at most B of them. `sampled`: see `as_read`."""
        columns, count, size = Columns.of(plan), plan.num_rows, self.size
        longs = np.zeros(3 * size + 1, np.int64)
        token_ids, positions, slots = longs[:-1].reshape(3, size)
        slots[count:] = self._scratch_page * PAGE_TOKENS
        token_ids[:count] = columns.token_ids
        positions[:count] = columns.positions
        slots[:count] = columns.slots
        longs[-1] = count
        kv_lens = np.ones(size, np.int32)
        kv_lens[:count] = columns.kv_lens
        page_table = columns.page_table
        if count < size:
            page_table = np.zeros((size, page_table.shape[1]), np.int32)
            page_table[count:, 0] = self._scratch_page
            page_table[:count] = columns.page_table
        send_into(torch.from_numpy(longs), self._longs)
        send_into(torch.from_numpy(kv_lens), self._kv_lens)
        send_into(torch.from_numpy(page_table), self.page_table[:, : page_table.shape[1]])
        if token_ids.min() < 0:
            put_sampled(self._longs[:size], sampled)


def build(plan: StepPlan, device: torch.device, sampled: Tensor = NOTHING) -> ForwardBatch:
    """A plan as a batch on `device`. All integers of one type travel in one copy. `sampled`: see
    `as_read`."""
    columns = Columns.of(plan)
    num_rows, num_tokens = len(columns.kv_lens), len(columns.token_ids)
    ends, first = columns.query_lens.cumsum(), len(plan.decodes)
    samples = np.array([work.sample is not None for work in plan.sequences], np.bool_)
    columns_64 = [columns.token_ids, columns.positions, columns.slots]
    columns_64 += [np.arange(first), ends[first:][samples] - 1]
    longs = to_device(torch.from_numpy(np.concatenate(columns_64)), device)
    token_ids = longs[:num_tokens]
    pending = (columns.token_ids < 0).nonzero()[0]
    if len(pending):
        put_sampled(token_ids[: int(pending[-1]) + 1], sampled)
    columns_32 = np.zeros(2 * num_rows + 1, np.int32)
    columns_32[1 : num_rows + 1], columns_32[num_rows + 1 :] = ends, columns.kv_lens
    ints = to_device(torch.from_numpy(columns_32), device)
    return ForwardBatch(
        token_ids=token_ids,
        positions=longs[num_tokens : 2 * num_tokens],
        slots=longs[2 * num_tokens : 3 * num_tokens],
        query_start=ints[: num_rows + 1],
        kv_lens=ints[num_rows + 1 :],
        page_table=to_device(torch.from_numpy(columns.page_table), device),
        logit_rows=longs[3 * num_tokens :],
        query_lens=(1,) * len(plan.decodes) + tuple(len(work.token_ids) for work in plan.sequences),
        kv_lens_host=tuple(columns.kv_lens.tolist()),
    )
