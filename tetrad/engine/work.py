"""What a step takes of one sequence, and what it gives it."""

from __future__ import annotations

from tetrad.core.request import Finish, RequestOutput
from tetrad.core.step import PENDING, SampledToken, SequenceWork
from tetrad.engine.sequence import Sequence

Planned = list[tuple[Sequence, SequenceWork]]
"""One step: each sequence beside what it computes."""


def plan_work(sequence: Sequence, budget: int, planned: Planned) -> int:
    """Add what it can compute within the budget; returns how many tokens that are."""
    start = sequence.num_computed
    total = sequence.num_total
    end = min(start + budget, total)
    token_ids = tuple(sequence.token_ids[start:end])
    if len(token_ids) < end - start:
        token_ids += (PENDING,)
    is_caught_up = end == total
    sample = sequence.sample_work() if is_caught_up else None
    work = SequenceWork(sequence.request.rid, token_ids, start, sequence.pages, sample)
    sequence.num_computed = end
    sequence.num_pending += is_caught_up
    planned.append((sequence, work))
    return end - start


def whole_tokens(planned: tuple[Sequence, SequenceWork]) -> int:
    """Tokens of a prompt that is computed from its first one on; 0 for what goes on from others."""
    work = planned[1]
    return 0 if work.start else len(work.token_ids)


def finish_of(sequence: Sequence, token_id: int) -> Finish | None:
    """Whether its newest token ends it."""
    if token_id in sequence.end_ids:
        return Finish("stop", matched_token=token_id)
    if len(sequence.token_ids) >= sequence.most_tokens:
        return Finish("length")
    return None


def output_of(
    sequence: Sequence, token: SampledToken | None, finish: Finish | None
) -> RequestOutput:
    """What its client is told of a step."""
    return RequestOutput(
        rid=sequence.request.rid,
        token_ids=(token.token_id,) if token else (),
        logprobs=(token.logprob,) if token and token.logprob else (),
        finish=finish,
        prompt_tokens=sequence.num_prompt,
        cached_tokens=sequence.num_cached_prompt or 0,
        num_preemptions=sequence.num_preemptions,
        queue_s=(sequence.queue_s or 0.0) if sequence.num_generated == 1 else 0.0,
    )
