"""The waiting queue, in service order.

Higher priorities go first. Within a priority API keys take turns, one request each; within a key
the order is that of arrival. Without priorities and with one key it is simply order of arrival.

A request's place is decided when it arrives, as in start-time fair queueing: it gets its key's next
turn, or the turn after the one being served if its key has none waiting. So a key that has sent a
hundred requests delays another key's first request by at most one of its own, and a key that was
silent has no claim on past turns.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from tetrad.engine.sequence import Sequence


@dataclass(slots=True)
class _Lane:
    """Those who wait with one priority."""

    turn: int
    """The highest that was served."""
    last: dict[str, int] = field(default_factory=dict)
    """By key: the turn of its last request, if that is yet to be served."""
    num_waiting: int = 0


class WaitingLine:
    """A sorted queue of sequences."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._lanes: dict[int, _Lane] = {}
        self._latest_turn = 0
        """Given to anybody: lanes that come anew begin behind it, and so behind all that run."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def first(self) -> Sequence:
        return self._sequences[0]

    def add(self, sequence: Sequence) -> None:
        """Give a newcomer its place."""
        request = sequence.request
        lane = self._lane(request.priority)
        turn = max(lane.turn, lane.last.get(request.key_name, 0)) + 1
        lane.last[request.key_name] = turn
        self._latest_turn = max(self._latest_turn, turn)
        sequence.place = (-request.priority, turn, sequence.arrival)
        self.put_back(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """One that ran waits again, in its old place."""
        self._lane(sequence.request.priority).num_waiting += 1
        if not self._sequences or self._sequences[-1].place < sequence.place:
            self._sequences.append(sequence)  # as nearly always
        else:
            insort(self._sequences, sequence, key=_place)

    def pop_first(self) -> Sequence:
        """Serve the first."""
        sequence = self._sequences.pop(0)
        request, turn = sequence.request, sequence.place[1]
        lane = self._lanes[request.priority]
        lane.turn = max(lane.turn, turn)
        if lane.last.get(request.key_name) == turn:
            del lane.last[request.key_name]
        self._left(request.priority)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """One that waits leaves."""
        del self._sequences[bisect_left(self._sequences, sequence.place, key=_place)]
        self._left(sequence.request.priority)

    def replace(self, old: Sequence, new: Sequence) -> None:
        """Another takes the place of one that waits."""
        self._sequences[bisect_left(self._sequences, old.place, key=_place)] = new

    def _lane(self, priority: int) -> _Lane:
        lane = self._lanes.get(priority)
        if lane is None:
            lane = self._lanes[priority] = _Lane(self._latest_turn)
        return lane

    def _left(self, priority: int) -> None:
        lane = self._lanes[priority]
        lane.num_waiting -= 1
        if not lane.num_waiting:
            del self._lanes[priority]


def _place(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.place
