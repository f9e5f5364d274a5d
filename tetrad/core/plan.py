"""The step is a value: the scheduler writes a `StepPlan`, the runner answers with a `StepResult`.

Both are plain data, so the scheduler is tested without torch, the runner without a scheduler and
the cost model without either. What a step has thousands of, sequences that decode one more token
and the tokens they get, are columns: objects take many times as long to make (docs/decisions/018).
What it has few of are the structs of `step.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tetrad.core.request import TokenLogprob
from tetrad.core.step import PAGE_TOKENS, SequenceWork

Ints = npt.NDArray[np.int64]
PageTable = npt.NDArray[np.int32]
Objects = npt.NDArray[np.object_]


def no_ints() -> Ints:
    """[0]."""
    return np.empty(0, np.int64)


def no_objects() -> Objects:
    """[0]."""
    return np.empty(0, np.object_)


@dataclass(frozen=True, slots=True, eq=False)
class Decodes:
    """D sequences that compute one token each and sample by temperature, top-k, top-p and min-p
    alone: no penalty, no bias, no grammar, no log-probabilities."""

    owners: Objects
    """[D] whose they are: what has a `rid`."""
    token_ids: Ints
    """[D]; pending ones are -1 - r, as in `SequenceWork`."""
    starts: Ints
    """[D] their positions."""
    page_table: PageTable
    """[D, n] page ids, enough for the longest; 0 behind a sequence's own."""
    seeds: npt.NDArray[np.uint64]
    """[D], the last 64 bits of each."""
    num_generated: Ints
    """[D], as in `SampleWork`."""
    rules: npt.NDArray[np.float32]
    """[3, D] temperature, 0 for greedy; top_p; min_p."""
    top_k: Ints
    """[D], 0 for all."""

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def rids(self) -> list[str]:
        """[D]."""
        return [owner.rid for owner in self.owners]

    def pages(self, index: int) -> tuple[int, ...]:
        """Those of one sequence that hold what it reads and writes."""
        num_pages = int(self.starts[index]) // PAGE_TOKENS + 1
        return tuple(self.page_table[index, :num_pages].tolist())


NO_DECODES = Decodes(
    owners=no_objects(),
    token_ids=no_ints(),
    starts=no_ints(),
    page_table=np.empty((0, 0), np.int32),
    seeds=np.empty(0, np.uint64),
    num_generated=no_ints(),
    rules=np.empty((3, 0), np.float32),
    top_k=no_ints(),
)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass: every sequence that computes tokens in it, be it one or a prompt chunk. Its
    rows are those of `decodes`, then `sequences`."""

    sequences: tuple[SequenceWork, ...]
    decodes: Decodes = NO_DECODES

    @property
    def num_rows(self) -> int:
        """Sequences."""
        return len(self.decodes) + len(self.sequences)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(len(s.token_ids) for s in self.sequences)


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """One entry for each row of the plan that samples, in the plan's order."""

    token_ids: Ints
    """[R]; -1: the logits held NaN or infinity, and the request must fail."""
    logprobs: Mapping[int, TokenLogprob] = field(default_factory=dict)
    """Row → log-probabilities, for those that asked for them."""
