"""Results of steps: mostly plain tokens, in columns, and a few full outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tetrad.core.plan import Ints, Objects, no_ints, no_objects
from tetrad.core.request import RequestOutput
from tetrad.engine.work import output_of

ALL = slice(None)


@dataclass(slots=True)
class StepGain:
    """Of one step. A token is plain if all else of its request was told before, since it runs, and
    stays as it was told."""

    outputs: list[RequestOutput] = field(default_factory=list)
    token_ids: Ints = field(default_factory=no_ints)
    """[n] the plain tokens."""
    numbers: Ints = field(default_factory=no_ints)
    """[n] `Request.number` of who gets each,"""
    workers: Ints = field(default_factory=no_ints)
    """[n] `Request.worker`,"""
    sequences: Objects = field(default_factory=no_objects)
    """[m] of whom `plain` picks who that is: looked up when somebody asks."""
    plain: slice | Ints = field(default_factory=lambda: ALL)

    def __len__(self) -> int:
        return len(self.token_ids) + len(self.outputs)

    def __iter__(self) -> Iterator[RequestOutput]:
        """All as outputs."""
        sequences = self.sequences[self.plain]
        for sequence, token_id in zip(sequences, self.token_ids.tolist(), strict=True):
            yield output_of(sequence, token_id, None)
        yield from self.outputs


@dataclass(slots=True)
class Gains:
    """Of several steps, one after the other."""

    steps: list[StepGain] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(map(len, self.steps))

    def __iter__(self) -> Iterator[RequestOutput]:
        """All as outputs."""
        for step in self.steps:
            yield from step
