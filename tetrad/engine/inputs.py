"""A step's plan as the tensors a model reads."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tetrad.core.step import PAGE_TOKENS, PENDING, SequenceWork, StepPlan
from tetrad.engine.blocks import pages_for
from tetrad.engine.transfer import send_into, to_device
from tetrad.layers.batch import ForwardBatch


@dataclass(frozen=True)
class Sampled:
    """What the step before has sampled, on the device: PENDING tokens are taken from here."""

    ids: Tensor
    """[R] int64, -1 where logits were not finite: read as token 0, since that request ends."""
    rows: Mapping[str, int]
    """Request → row."""

    def fill(self, token_ids: Tensor) -> Tensor:
        """`token_ids` [T] with `ids[row]` for each -1 - row."""
        rows = (-1 - token_ids).clamp_(min=0)
        return torch.where(token_ids < 0, self.ids[rows].clamp(min=0), token_ids)


class StaticInputs:
    """The tensors that one recorded decode step of B rows reads, filled before each replay.

    Rows that no sequence needs are padding: token 0 at position 0 of the scratch page.
    """

    def __init__(self, page_table: Tensor, scratch_page: int, most_kv_tokens: int) -> None:
        """`page_table` [B, max_pages] int32 may be shared by steps, as one runs at a time."""
        size, device = len(page_table), page_table.device
        self.size = size
        self.page_table = page_table
        self.padding = SequenceWork("", (0,), 0, (scratch_page,), None)
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

    def fill(
        self, longs: array[int], kv_lens: array[int], pages: Tensor, previous: Sampled
    ) -> None:
        """Token ids, positions, slots and the number of real rows; lengths; page ids [B, n]."""
        token_ids = self._longs[: self.size]
        send_into(torch.frombuffer(longs, dtype=torch.int64), self._longs)
        send_into(torch.frombuffer(kv_lens, dtype=torch.int32), self._kv_lens)
        send_into(pages, self.page_table[:, : pages.shape[1]])
        if min(longs[: self.size]) < 0:
            token_ids.copy_(previous.fill(token_ids))


NOTHING = Sampled(torch.empty(0, dtype=torch.int64), {})


class InputBuilder:
    """Turns plans into batches on `device`. All integers of one type travel in one copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._page_table = PageTable()

    def build(self, plan: StepPlan, previous: Sampled = NOTHING) -> ForwardBatch:
        """`previous`: of the step launched before."""
        works = plan.sequences
        query_lens = tuple(len(work.token_ids) for work in works)
        kv_lens = tuple(work.num_kv_tokens for work in works)
        ends = list(accumulate(query_lens))
        num_tokens = ends[-1]
        logit_rows = [end - 1 for end, work in zip(ends, works, strict=True) if work.sample]
        columns = _token_columns(works, previous.rows)
        longs = self._send(array("q", [*columns, *logit_rows]), torch.int64)
        token_ids = longs[:num_tokens]
        if any(work.token_ids[-1] == PENDING for work in works):
            token_ids = previous.fill(token_ids)
        ints = self._send(array("i", [0, *ends, *kv_lens]), torch.int32)
        table = self._page_table.read(works, pages_for(max(kv_lens)))
        return ForwardBatch(
            token_ids=token_ids,
            positions=longs[num_tokens : 2 * num_tokens],
            slots=longs[2 * num_tokens : 3 * num_tokens],
            query_start=ints[: len(works) + 1],
            kv_lens=ints[len(works) + 1 :],
            page_table=to_device(table, self._device),
            logit_rows=longs[3 * num_tokens :],
            query_lens=query_lens,
            kv_lens_host=kv_lens,
        )

    def fill(self, plan: StepPlan, inputs: StaticInputs, previous: Sampled = NOTHING) -> None:
        """Write a step of single tokens, at most B of them, into `inputs`."""
        num_real = len(plan.sequences)
        works = (*plan.sequences, *[inputs.padding] * (inputs.size - num_real))
        token_ids = [
            -1 - previous.rows[work.rid] if work.token_ids[0] == PENDING else work.token_ids[0]
            for work in works
        ]
        positions = [work.start for work in works]
        slots = [
            work.pages[at // PAGE_TOKENS] * PAGE_TOKENS + at % PAGE_TOKENS
            for work, at in zip(works, positions, strict=True)
        ]
        longs = array("q", [*token_ids, *positions, *slots, num_real])
        kv_lens = array("i", [at + 1 for at in positions])
        pages = self._page_table.read(works, pages_for(max(kv_lens)))
        inputs.fill(longs, kv_lens, pages, previous)

    def _send(self, values: array[int], dtype: torch.dtype) -> Tensor:
        return to_device(torch.frombuffer(values, dtype=dtype), self._device)


def _token_columns(works: Sequence[SequenceWork], rows: Mapping[str, int]) -> list[int]:
    """Token ids of all rows, then positions, then slots. Ids that are sampled in row r of the step
    before are -1 - r."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    for work in works:
        token_ids += work.token_ids
        if token_ids[-1] == PENDING:
            token_ids[-1] = -1 - rows[work.rid]
        positions += range(work.start, work.num_kv_tokens)
        slots += _slots(work)
    return token_ids + positions + slots


def _slots(work: SequenceWork) -> list[int]:
    """Slot of each of the work's tokens, page by page."""
    slots: list[int] = []
    position, end = work.start, work.num_kv_tokens
    while position < end:
        page, offset = divmod(position, PAGE_TOKENS)
        count = min(PAGE_TOKENS - offset, end - position)
        first = work.pages[page] * PAGE_TOKENS + offset
        slots += range(first, first + count)
        position += count
    return slots


class PageTable:
    """Host copy of the page ids of each row. A sequence's tuple of pages is a new object only when
    it grew or moved, so most rows are recognised and left as they are."""

    def __init__(self) -> None:
        self._table = torch.zeros(0, 0, dtype=torch.int32)
        self._rows: list[tuple[int, ...]] = []

    def read(self, works: Sequence[SequenceWork], width: int) -> Tensor:
        """[S, width] int32, a copy; padded with 0."""
        self._grow(len(works), max(len(work.pages) for work in works))
        for row, work in enumerate(works):
            if self._rows[row] is not work.pages:
                self._write(row, work.pages)
        return self._table[: len(works), :width].clone()

    def _grow(self, num_rows: int, width: int) -> None:
        rows, columns = self._table.shape
        if num_rows > rows or width > columns:
            size = (max(num_rows, 2 * rows), max(width, 2 * columns))
            self._table = torch.zeros(size, dtype=torch.int32)
            self._rows = [()] * size[0]

    def _write(self, row: int, pages: tuple[int, ...]) -> None:
        self._table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        self._table[row, len(pages) : len(self._rows[row])] = 0
        self._rows[row] = pages
