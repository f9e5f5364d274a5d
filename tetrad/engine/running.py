"""Those who run, in the order of service, and what of them is looked at together."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator

import numpy as np
import numpy.typing as npt

from tetrad.core.limits import Limits
from tetrad.core.plan import Ints
from tetrad.engine.blocks import pages_for
from tetrad.engine.rows import Rows
from tetrad.engine.sequence import Sequence


class Running:
    """A sorted list of sequences, each with a row in `rows`."""

    def __init__(self, limits: Limits) -> None:
        self.rows = Rows(limits.max_running_requests)
        self._order = array("q")
        """Row of each, in order."""
        self._ends: Ints = np.zeros(max(limits.vocab, *limits.eos_ids, 0) + 1, np.int64)
        self._end_counts = self._ends.data
        """By token id: how many of them it ends."""
        self._with_history: set[Sequence] = set()
        self.most_pages = 0
        """Of all, once each has all the tokens that it may get."""

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._from(0))

    @property
    def last(self) -> Sequence:
        sequence: Sequence = self.rows.sequences[self._order[-1]]
        return sequence

    @property
    def order(self) -> Ints:
        """Row of each, in order."""
        # a view would keep it from growing
        return np.frombuffer(self._order.tobytes(), np.int64)

    @property
    def awaits_tokens(self) -> bool:
        """Has one a token on its way that it must know before the next is chosen?"""
        return any(sequence.num_pending for sequence in self._with_history)

    def may_end(self, token_ids: Ints) -> npt.NDArray[np.bool_]:
        """[n] is it an end token of anybody?"""
        return self._ends.take(token_ids, mode="clip") > 0

    def add(self, sequence: Sequence) -> None:
        """It has its pages."""
        self.rows.enter(sequence)
        index = len(self._order)
        if index and sequence.place < self.last.place:
            index = bisect_left(self._order, sequence.place, key=self._place)
        self._order.insert(index, sequence.row)
        for token_id in sequence.end_ids:
            self._end_counts[token_id] += 1
        if sequence.needs_history:
            self._with_history.add(sequence)
        self.most_pages += pages_for(sequence.most_tokens)

    def remove(self, sequences: Collection[Sequence]) -> list[tuple[int, ...]]:
        """Returns the pages to give back, of each."""
        self._with_history.difference_update(sequences)
        for sequence in sequences:
            self.most_pages -= pages_for(sequence.most_tokens)
            for token_id in sequence.end_ids:
                self._end_counts[token_id] -= 1
        held, order = [self.rows.leave(sequence) for sequence in sequences], self.order
        self._order = array("q", order[self.rows.is_taken(order)].tobytes())
        return held

    def below(self, priority: int) -> list[Sequence]:
        """Those of a lower priority: the last ones."""
        first = bisect_right(self._order, -priority, key=lambda row: self._place(row)[0])
        return self._from(first)

    def _place(self, row: int) -> tuple[int, int, int]:
        sequence: Sequence = self.rows.sequences[row]
        return sequence.place

    def _from(self, first: int) -> list[Sequence]:
        found: list[Sequence] = self.rows.sequences.take(self.order[first:]).tolist()
        return found
