"""A runner without a model: it keeps tokens in slots and derives the next one from what it reads.

Whatever goes wrong with pages, chunks or resumption changes what it reads, hence what it says.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from tetrad.core.request import Request, SamplingParams, TokenLogprob
from tetrad.core.step import (
    PAGE_TOKENS,
    PENDING,
    SampledToken,
    SequenceWork,
    StepPlan,
    StepResult,
)
from tetrad.engine.admission import Limits
from tetrad.engine.forecast import Forecast
from tetrad.engine.scheduler import Scheduler
from tetrad.engine.sequence import Sequence as EngineSequence

VOCAB = 40
EOS = 7
UNWRITTEN = -1
SPOILED = -2


def next_token(token_ids: Sequence[int], seed: int, banned: Sequence[int] = ()) -> int:
    """The fake model: any token of the past and the seed matter."""
    digest = blake2b(array("i", token_ids), digest_size=8, salt=seed.to_bytes(8, "little"))
    first = int.from_bytes(digest.digest(), "little")
    return next(i for k in range(VOCAB) if (i := (first + k) % VOCAB) not in banned)


def expected_output(request: Request, seed: int) -> list[int]:
    """What an undisturbed run of `request` gives."""
    sampling = request.sampling
    ends = {*sampling.stop_token_ids} | (set() if sampling.ignore_eos else {EOS})
    known, num_prompt = list(request.prompt_ids), len(request.prompt_ids)
    while len(known) < num_prompt + sampling.max_new_tokens:
        is_early = len(known) - num_prompt < sampling.min_new_tokens
        known.append(next_token(known, seed, tuple(ends) if is_early else ()))
        if known[-1] in ends:
            break
    return known[num_prompt:]


class Done:
    """What a fake runner gives back: there is nothing to wait for."""

    def __init__(self, result: StepResult) -> None:
        self.result = result

    def wait(self) -> StepResult:
        return self.result


class FakeRunner:
    """`spoiled` rids write garbage and give logits that are not finite."""

    def __init__(self, num_pages: int) -> None:
        self.slots = [UNWRITTEN] * (num_pages * PAGE_TOKENS)
        self.spoiled: set[str] = set()
        self._previous: dict[str, int] = {}

    def launch(self, plan: StepPlan) -> Done:
        for work in plan.sequences:
            self._write(work)
        sampled = tuple(self._sample(w) for w in plan.sequences if w.sample)
        self._previous = {token.rid: token.token_id for token in sampled}
        return Done(StepResult(sampled))

    def _write(self, work: SequenceWork) -> None:
        for position, token_id in enumerate(work.token_ids, work.start):
            if token_id == PENDING:
                token_id = self._previous[work.rid]
            is_spoiled = work.rid in self.spoiled
            self.slots[_slot(work, position)] = SPOILED if is_spoiled else token_id

    def _sample(self, work: SequenceWork) -> SampledToken:
        if work.rid in self.spoiled:
            return SampledToken(work.rid, -1, is_finite=False)
        past = [self.slots[_slot(work, i)] for i in range(work.num_kv_tokens)]
        assert UNWRITTEN not in past, f"{work.rid} reads a slot nobody wrote"
        assert SPOILED not in past, f"{work.rid} reads what a failed request wrote"
        sample = work.sample
        assert sample is not None
        assert sample.history_ids in ((), tuple(past)), f"{work.rid} has another history"
        assert sample.num_generated == len(past) - sample.num_prompt
        token_id = next_token(past, sample.seed, sample.banned_ids)
        wants_logprob = sample.params.num_logprobs is not None
        logprob = TokenLogprob(token_id, -float(sum(past))) if wants_logprob else None
        return SampledToken(work.rid, token_id, is_finite=True, logprob=logprob)


def _slot(work: SequenceWork, position: int) -> int:
    return work.pages[position // PAGE_TOKENS] * PAGE_TOKENS + position % PAGE_TOKENS


def make_limits(
    num_pages: int = 16, *, running: int = 4, step: int = 96, context: int = 512
) -> Limits:
    return Limits(num_pages, running, step, context, VOCAB, (EOS,))


def make_scheduler(
    limits: Limits | None = None,
    *,
    use_prefix_cache: bool = True,
    preemption_threshold: int | None = None,
) -> Scheduler:
    return Scheduler(
        limits or make_limits(),
        use_prefix_cache=use_prefix_cache,
        draw_seed=lambda n: 1000 + n,
        preemption_threshold=preemption_threshold,
    )


class NoForecast(Forecast):
    """Expects nobody to grow, so that everybody is let in and pages run out."""

    def remaining(self, sequence: EngineSequence) -> int:
        return 0


def make_request(
    rid: str,
    prompt: int | Sequence[int] = 10,
    new: int = 5,
    *,
    priority: int = 0,
    key_name: str = "",
    **sampling: object,
) -> Request:
    """`prompt`: the ids, or how many. Ignores the end token unless told otherwise."""
    ids = [(3 * i + 1) % VOCAB for i in range(prompt)] if isinstance(prompt, int) else prompt
    params: dict[str, object] = {"max_new_tokens": new, "ignore_eos": True, "seed": 0, **sampling}
    chosen = SamplingParams(**params)  # type: ignore[arg-type]
    return Request(rid, tuple(ids), chosen, priority, key_name)
