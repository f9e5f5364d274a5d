"""What a step takes of sequences, and what it gives one of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from tetrad.core.plan import NO_DECODES, Decodes, Ints, StepPlan, no_ints
from tetrad.core.request import Finish, RequestOutput, TokenLogprob
from tetrad.core.step import SampleWork, SequenceWork
from tetrad.engine.rows import Rows, Stays
from tetrad.engine.sequence import Sequence

NO_STAYS = Rows(0).stays(no_ints())


@dataclass(slots=True)
class PlannedStep:
    """A step that is not applied yet, and whose its rows are: columns [D] and pairs."""

    decodes: Decodes = NO_DECODES
    stays: Stays = NO_STAYS
    """In those rows: by now others may have them."""
    works: list[tuple[Sequence, SequenceWork]] = field(default_factory=list)
    """What goes on, then newcomers."""

    @property
    def is_empty(self) -> bool:
        return not (len(self.decodes) or self.works)

    def decode(self, table: Rows, rows: Ints) -> None:
        """One more token for each that has one of these rows."""
        if len(rows):
            self.stays = table.stays(rows)
            self.decodes = table.plan_decodes(self.stays)

    def add(self, table: Rows, sequence: Sequence, budget: int) -> int:
        """What one can compute within the budget; returns how many tokens that are."""
        start, total = sequence.num_computed, sequence.num_total
        end = min(start + budget, total)
        token_ids = sequence.token_ids[start:end]
        if len(token_ids) < end - start:
            token_ids.append(int(table.pending[sequence.row]))
        sample = sequence.expect() if end == total else None
        sequence.compute(end)
        work = SequenceWork(sequence.request.rid, token_ids, start, sequence.pages, sample)
        self.works.append((sequence, work))
        return end - start

    def commit(self, table: Rows) -> StepPlan:
        """The plan. Its samples are those that tokens of the next step may be pending on."""
        others = [sequence.row for sequence, work in self.works if work.sample]
        table.sampled(self.stays.rows, others)
        return StepPlan(tuple(work for _, work in self.works), self.decodes)

    def pairs(self) -> Iterator[tuple[Sequence, SequenceWork]]:
        """Each sequence beside what it computes, in the order of the plan."""
        for index, sequence in enumerate(self.stays.sequences):
            yield sequence, self.work_of(index)
        yield from self.works

    def work_of(self, index: int) -> SequenceWork:
        """A row of `decodes` as a struct."""
        decodes, sequence = self.decodes, self.stays.sequences[index]
        return SequenceWork(
            rid=sequence.request.rid,
            token_ids=array("i", (int(decodes.token_ids[index]),)),
            start=int(decodes.starts[index]),
            pages=decodes.pages(index),
            sample=SampleWork(
                params=sequence.request.sampling,
                seed=sequence.seed,
                num_generated=int(decodes.num_generated[index]),
                num_prompt=sequence.num_prompt,
            ),
        )


def whole_tokens(planned: tuple[Sequence, SequenceWork]) -> int:
    """Tokens of a prompt that is computed from its first one on; 0 for what goes on from others."""
    work = planned[1]
    return 0 if work.start else len(work.token_ids)


def finish_of(sequence: Sequence, token_id: int) -> Finish | None:
    """Whether its newest token ends it."""
    if token_id in sequence.end_ids:
        return Finish("stop", matched_token=token_id)
    if sequence.num_known >= sequence.most_tokens:
        return Finish("length")
    return None


def output_of(
    sequence: Sequence,
    token_id: int | None,
    finish: Finish | None,
    logprob: TokenLogprob | None = None,
) -> RequestOutput:
    """What its client is told of a step."""
    return RequestOutput(
        rid=sequence.request.rid,
        token_ids=() if token_id is None else (token_id,),
        logprobs=(logprob,) if logprob else (),
        finish=finish,
        prompt_tokens=sequence.num_prompt,
        cached_tokens=sequence.num_cached_prompt or 0,
        num_preemptions=sequence.num_preemptions,
        queue_s=(sequence.queue_s or 0.0) if sequence.num_generated == 1 else 0.0,
    )
