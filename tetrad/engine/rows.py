"""The numbers of the sequences that run, as columns: a row for each, which it keeps while it runs.

What a step does to thousands of sequences, one more token each, it does to columns. What happens to
few of them in a step, such as a new page, an end or a chunk of a prompt, goes through `Sequence`,
whose counts are views of its row: there is one truth. No torch.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tetrad.core.plan import Decodes, Ints, Objects, PageTable, no_ints
from tetrad.core.step import IN_PAGE, PAGE_TOKENS
from tetrad.engine.sequence import SEED_MASK, Sequence, sampling_rules

FIRST_PAGES = 16
"""Columns of page ids at first."""


@dataclass(frozen=True, slots=True, eq=False)
class Stays:
    """Who has some rows, and what does not change of them while they have: columns [D]."""

    rows: Ints
    sequences: Objects
    seeds: npt.NDArray[np.uint64]
    rules: npt.NDArray[np.float32]
    """[3, D]."""
    num_prompt: Ints
    most_tokens: Ints
    first_told: Ints
    """Known tokens when it is told of the first since it runs."""
    top_k: Ints
    serials: Ints
    """No other stay has the same."""
    numbers: Ints
    """`Request.number`."""
    workers: Ints


class Rows:
    """Columns [N], N the most that run. The integers lie in one matrix, so that a sequence is
    written with one assignment."""

    def __init__(self, num_rows: int) -> None:
        numbers: Ints = np.zeros((13, num_rows), np.int64)
        self._numbers = numbers.reshape(-1).data
        self.known, self.total, self.computed = numbers[:3]  # as in `Sequence.counts`
        self.plain_from, self.asked, self.num_shared = numbers[3:6]
        self._lasting = numbers[6:]  # as they end `Stays`
        self.num_prompt, self.most_tokens, _, _, self.serial, _, _ = self._lasting
        self.num_pages: Ints = np.zeros(num_rows, np.int64)
        self._num_pages = self.num_pages.data
        self.pending: Ints = np.zeros(num_rows, np.int64)
        """What stands for the token of the last step that it sampled in: -1 - r, r its row."""
        self._first_pending = -1 - np.arange(num_rows)
        self.seeds = np.zeros(num_rows, np.uint64)
        self.rules = np.zeros((3, num_rows), np.float32)
        self._seeds, self._rules = self.seeds.data, self.rules.reshape(-1).data.cast("B").cast("f")
        self.recent = np.zeros((num_rows, PAGE_TOKENS), np.int32)
        """The token at position p stands in column p & IN_PAGE, see `Sequence.token_ids`."""
        self._recent = self.recent.reshape(-1)
        self._newest = self._recent.data
        self.pages: PageTable = np.zeros((num_rows, FIRST_PAGES), np.int32)
        self.sequences = np.full(num_rows, None, np.object_)
        self._free = list(range(num_rows - 1, -1, -1))
        self._num_stays = 0
        self._nobody = self._stays = self._stays_of(no_ints())
        self._stays_since = 0

    def enter(self, sequence: Sequence) -> None:
        """It runs from now on."""
        row = sequence.row = self._free.pop()
        self._num_stays += 1
        params = sequence.request.sampling
        temperature, top_p, min_p, top_k = sampling_rules(params)
        its_numbers = self._numbers[row :: len(self.sequences)]
        its_numbers[:] = array(
            self._numbers.format,
            (
                *sequence.counts,
                sequence.plain_from,
                sequence.asked,
                sequence.num_shared,
                sequence.num_prompt,
                sequence.most_tokens,
                sequence.num_known + 1,
                top_k,
                self._num_stays,
                sequence.request.number,
                sequence.request.worker,
            ),
        )
        rules, size = self._rules, len(self.sequences)
        rules[row], rules[row + size], rules[row + 2 * size] = temperature, top_p, min_p
        self._seeds[row] = sequence.seed & SEED_MASK
        self.sequences[row] = sequence
        sequence.settle(its_numbers[:3], self._newest[row * PAGE_TOKENS : (row + 1) * PAGE_TOKENS])
        num_pages = self._num_pages[row] = len(sequence.pages)
        self._make_room(num_pages)
        self.pages[row, :num_pages] = array("i", sequence.pages)

    def leave(self, sequence: Sequence) -> tuple[int, ...]:
        """It does not run any more; returns the pages to give back."""
        row, pages = sequence.row, sequence.pages
        sequence.unsettle()
        self.pages[row, : len(pages)] = 0
        self._num_pages[row] = self.serial[row] = 0
        self.sequences[row] = None
        self._free.append(row)
        self._stays = self._nobody  # whose sequences would live on until others decode
        return pages

    def is_taken(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """Which of them does somebody have?"""
        found: npt.NDArray[np.bool_] = self.serial.take(rows) > 0
        return found

    def add_pages(self, sequence: Sequence, pages: tuple[int, ...]) -> None:
        """Behind those it has."""
        first, row = len(sequence.pages), sequence.row
        sequence.pages += pages
        num_pages = len(sequence.pages)
        self._make_room(num_pages)
        self.pages[row, first:num_pages] = pages
        self.num_pages[row] = num_pages

    def add_page_each(self, rows: Ints, pages: list[int]) -> None:
        """One of `pages` for each."""
        places = self.num_pages[rows]
        self._make_room(int(places.max()) + 1)
        self.pages[rows, places] = pages
        self.num_pages[rows] = places + 1
        for sequence, page in zip(self.sequences[rows], pages, strict=True):
            sequence.pages += (page,)

    def _make_room(self, num_pages: int) -> None:
        if num_pages > self.pages.shape[1]:
            wider = np.zeros((len(self.pages), 2 * num_pages), np.int32)
            wider[:, : self.pages.shape[1]] = self.pages
            self.pages = wider

    def is_short_of_pages(self, rows: Ints, num_tokens: Ints) -> npt.NDArray[np.bool_]:
        """Which of `rows` have pages that do not hold so many tokens?"""
        return num_tokens > self.num_pages.take(rows) * PAGE_TOKENS

    def add_tokens(self, rows: Ints, token_ids: Ints) -> Ints:
        """One that was pending is known now for each of `rows`; returns how many are."""
        places: Ints = self.known.take(rows)
        cells = rows * PAGE_TOKENS
        cells += places & IN_PAGE
        its = token_ids.astype(np.int32)
        self._recent[cells] = its
        places += 1
        self.known[rows] = places
        return places

    def stays(self, rows: Ints) -> Stays:
        """Of those that run in `rows`. As a rule the same as in the step before."""
        is_same = self._stays_since == self._num_stays and np.array_equal(self._stays.rows, rows)
        if not is_same:
            self._stays, self._stays_since = self._stays_of(rows), self._num_stays
        return self._stays

    def _stays_of(self, rows: Ints) -> Stays:
        return Stays(
            rows,
            self.sequences.take(rows),
            self.seeds.take(rows),
            self.rules.take(rows, axis=1),
            *self._lasting.take(rows, axis=1),
        )

    def sampled(self, rows: Ints, others: list[int]) -> None:
        """A step samples for those in `rows`, and then for `others`."""
        self.pending[rows] = self._first_pending[: len(rows)]
        for place, row in enumerate(others, len(rows)):
            self.pending[row] = -1 - place

    def plan_decodes(self, stays: Stays) -> Decodes:
        """One more token for each of them [D], which are one token behind. From here on it counts
        as computed, and what it samples as pending."""
        rows = stays.rows
        total = self.total.take(rows)
        is_known = total == self.known.take(rows)
        token_ids = self.pending.take(rows)
        if is_known.any():
            places = (total[is_known] - 1) & IN_PAGE
            token_ids[is_known] = self.recent[rows[is_known], places]
        self.total[rows] = total + 1
        self.computed[rows] = total
        num_pages = -(-int(total.max(initial=0)) // PAGE_TOKENS)
        return Decodes(
            owners=stays.sequences,
            token_ids=token_ids,
            starts=total - 1,
            page_table=self.pages[:, :num_pages].take(rows, axis=0),
            seeds=stays.seeds,
            num_generated=total - stays.num_prompt,
            rules=stays.rules,
            top_k=stays.top_k,
        )
