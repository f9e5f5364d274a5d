"""The numbers of the sequences that run, as columns: a row for each, which it keeps while it runs.

What a step does to thousands of sequences, one more token each, it does to columns. What happens to
few of them in a step, such as a new page, an end or a chunk of a prompt, goes through `Sequence`,
whose counts are views of its row: there is one truth. No torch.
"""

from __future__ import annotations

import numpy as np

from tetrad.core.plan import Decodes, Ints, PageTable
from tetrad.core.step import PAGE_TOKENS
from tetrad.engine.sequence import SEED_MASK, Sequence, sampling_rules

FIRST_PAGES = 16
"""Columns of page ids at first."""


class Rows:
    """Columns [N], N the most that run. The integers lie in one matrix, so that a sequence is
    written with one assignment."""

    def __init__(self, num_rows: int) -> None:
        self.numbers: Ints = np.zeros((13, num_rows), np.int64)
        (
            *(self.known, self.pending, self.computed),  # as in `Sequence.counts`
            self.num_prompt,
            self.most_tokens,
            self.plain_from,
            self.asked,
            self.num_shared,
            self.top_k,
            self.first_told,  # known tokens when it is told of the first since it runs
            self.serial,  # of this stay: no other has the same
            self.number,  # of its request
            self.worker,
        ) = self.numbers
        self.num_pages: Ints = np.zeros(num_rows, np.int64)
        self.sampled_row: Ints = np.zeros(num_rows, np.int64)
        """Row of the last step's result."""
        self.seeds = np.zeros(num_rows, np.uint64)
        self.rules = np.zeros((3, num_rows), np.float32)
        self.recent = np.zeros((num_rows, PAGE_TOKENS), np.int32)
        """The token at position p stands in column p % PAGE_TOKENS, see `Sequence.token_ids`."""
        self.pages: PageTable = np.zeros((num_rows, FIRST_PAGES), np.int32)
        self.sequences = np.full(num_rows, None, np.object_)
        self.rids = np.full(num_rows, None, np.object_)
        self._free = list(range(num_rows - 1, -1, -1))
        self._num_stays = 0

    def enter(self, sequence: Sequence) -> None:
        """It runs from now on: nothing of it is pending."""
        row = sequence.row = self._free.pop()
        self._num_stays += 1
        params = sequence.request.sampling
        *rules, top_k = sampling_rules(params)
        self.numbers[:, row] = (
            *sequence.counts.tolist(),
            sequence.num_prompt,
            sequence.most_tokens,
            sequence.plain_from,
            sequence.asked,
            sequence.num_shared,
            top_k,
            sequence.num_known + 1,
            self._num_stays,
            sequence.request.number,
            sequence.request.worker,
        )
        self.rules[:, row] = rules
        self.seeds[row] = sequence.seed & SEED_MASK
        self.sequences[row] = sequence
        self.rids[row] = sequence.request.rid
        sequence.settle(self.numbers[:3, row], self.recent[row])
        pages, sequence.pages = sequence.pages, ()
        self.add_pages(sequence, pages)

    def leave(self, sequence: Sequence) -> tuple[int, ...]:
        """It does not run any more; returns the pages to give back."""
        row, pages = sequence.row, sequence.pages
        sequence.unsettle()
        self.pages[row, : len(pages)] = 0
        self.num_pages[row] = self.serial[row] = 0
        self.sequences[row] = self.rids[row] = None
        self._free.append(row)
        return pages

    def add_pages(self, sequence: Sequence, pages: tuple[int, ...]) -> None:
        """Behind those it has."""
        first, row = len(sequence.pages), sequence.row
        sequence.pages += pages
        num_pages = len(sequence.pages)
        self._make_room(num_pages)
        self.pages[row, first:num_pages] = pages
        self.num_pages[row] = num_pages

    def add_page_each(self, sequences: list[Sequence], pages: list[int]) -> None:
        """One of `pages` for each."""
        rows = [sequence.row for sequence in sequences]
        places = self.num_pages[rows]
        self._make_room(int(places.max()) + 1)
        self.pages[rows, places] = pages
        self.num_pages[rows] = places + 1
        for sequence, page in zip(sequences, pages, strict=True):
            sequence.pages += (page,)

    def _make_room(self, num_pages: int) -> None:
        if num_pages > self.pages.shape[1]:
            wider = np.zeros((len(self.pages), 2 * num_pages), np.int32)
            wider[:, : self.pages.shape[1]] = self.pages
            self.pages = wider

    def short_of_pages(self, rows: Ints, num_tokens: Ints) -> list[Sequence]:
        """Those of `rows` whose pages do not hold so many tokens."""
        is_short = num_tokens > self.num_pages.take(rows) * PAGE_TOKENS
        found: list[Sequence] = self.sequences.take(rows[is_short]).tolist()
        return found

    def add_tokens(self, rows: Ints, token_ids: Ints) -> Ints:
        """One that was pending is known now for each of `rows`; returns how many each knows."""
        places = self.known.take(rows)
        self.recent[rows, places % PAGE_TOKENS] = token_ids
        known: Ints = places + 1
        self.known[rows] = known
        self.pending[rows] -= 1
        return known

    def plan_decodes(self, rows: Ints) -> Decodes:
        """One more token for each of `rows` [D], which are one token behind. From here on it counts
        as computed, and what it samples as pending."""
        known, pending = self.known.take(rows), self.pending.take(rows)
        total = known + pending
        starts = total - 1
        token_ids = np.where(
            pending > 0,
            -1 - self.sampled_row.take(rows),
            self.recent[rows, (known - 1) % PAGE_TOKENS],
        )
        self.pending[rows] = pending + 1
        self.computed[rows] = total
        return Decodes(
            rids=self.rids.take(rows),
            token_ids=token_ids,
            starts=starts,
            page_table=self.pages[rows, : -(-int(total.max(initial=0)) // PAGE_TOKENS)],
            seeds=self.seeds.take(rows),
            num_generated=total - self.num_prompt.take(rows),
            rules=self.rules.take(rows, axis=1),
            top_k=self.top_k.take(rows),
        )
