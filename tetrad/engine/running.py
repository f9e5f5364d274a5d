"""Those who run, in the order of service, and what of them is looked at together."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from tetrad.core.plan import Ints
from tetrad.engine.admission import Limits
from tetrad.engine.blocks import pages_for
from tetrad.engine.rows import Rows
from tetrad.engine.sequence import Sequence


class Running:
    """A sorted list of sequences, each with a row in `rows`."""

    def __init__(self, limits: Limits) -> None:
        self.rows = Rows(limits.max_running_requests)
        self._sequences: list[Sequence] = []
        self._places: list[tuple[int, int, int]] = []
        """Of each, in order."""
        self._order: Ints = np.zeros(limits.max_running_requests + 1, np.int64)
        self._ends: Ints = np.zeros(max(limits.vocab, *limits.eos_ids, 0) + 1, np.int64)
        """By token id: how many of them it ends."""
        self._with_history: set[Sequence] = set()
        self.most_pages = 0
        """Of all, once each has all the tokens that it may get."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __getitem__(self, index: int) -> Sequence:
        return self._sequences[index]

    @property
    def order(self) -> Ints:
        """Row of each, in order. Valid until somebody comes or goes."""
        return self._order[: len(self._sequences)]

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
        index, count = self._index(sequence), len(self._sequences)
        self._sequences.insert(index, sequence)
        self._places.insert(index, sequence.place)
        self._order[index + 1 : count + 1] = self._order[index:count]
        self._order[index] = sequence.row
        for token_id in sequence.end_ids:
            self._ends[token_id] += 1
        if sequence.needs_history:
            self._with_history.add(sequence)
        self.most_pages += pages_for(sequence.most_tokens)

    def remove(self, sequence: Sequence) -> tuple[int, ...]:
        """Returns the pages to give back."""
        index, count = self._index(sequence), len(self._sequences)
        assert self._sequences.pop(index) is sequence
        del self._places[index]
        self._order[index : count - 1] = self._order[index + 1 : count]
        for token_id in sequence.end_ids:
            self._ends[token_id] -= 1
        self._with_history.discard(sequence)
        self.most_pages -= pages_for(sequence.most_tokens)
        return self.rows.leave(sequence)

    def below(self, priority: int) -> list[Sequence]:
        """Those of a lower priority: the last ones."""
        first = bisect_right(self._places, -priority, key=itemgetter(0))
        return self._sequences[first:]

    def _index(self, sequence: Sequence) -> int:
        return bisect_left(self._places, sequence.place)
