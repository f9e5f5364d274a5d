"""A runner without a model: it keeps tokens in slots and derives the next one from what it reads.

Whatever goes wrong with pages, chunks or resumption changes what it reads, hence what it says.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from tetrad.core.limits import Limits
from tetrad.core.plan import NO_DECODES, Decodes, Ints, StepPlan, StepResult
from tetrad.core.request import Grammar, Request, SamplingParams, TokenLogprob, packed
from tetrad.core.step import PAGE_TOKENS, SampleWork, SequenceWork
from tetrad.engine.blocks import pages_for
from tetrad.engine.forecast import Forecast
from tetrad.engine.grammars import Masks
from tetrad.engine.running import Running
from tetrad.engine.scheduler import Scheduler
from tetrad.engine.sequence import Sequence as EngineSequence
from tetrad.engine.sequence import sampling_rules
from tetrad.grammar.compiler import Compiled, Refused
from tetrad.grammar.layout import ALLOWED, GIVEN_UP

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
    is_endless = sampling.ignore_eos and sampling.grammar is None
    ends = {*sampling.stop_token_ids} | (set() if is_endless else {EOS})
    known, num_prompt = list(request.prompt_ids), len(request.prompt_ids)
    while len(known) < num_prompt + sampling.max_new_tokens:
        is_early = len(known) - num_prompt < sampling.min_new_tokens
        banned = [*ends] if is_early else []
        answer = _constrained_part(known[num_prompt:], sampling.grammar)
        if answer is not None:
            banned += {*range(VOCAB)} - fake_allowed(answer)
        known.append(next_token(known, seed, banned))
        if known[-1] in ends:
            break
    return known[num_prompt:]


def _constrained_part(token_ids: list[int], grammar: Grammar | None) -> list[int] | None:
    """What the fake grammar reads of an output; None where it says nothing of the next token."""
    if grammar is None or grammar.close_id is None:
        return None if grammar is None else token_ids
    if grammar.close_id not in token_ids:
        return None
    return token_ids[token_ids.index(grammar.close_id) + 1 :]


class Done:
    """What a fake runner gives back: there is nothing to wait for."""

    def __init__(self, result: StepResult) -> None:
        self.result = result

    def wait(self) -> StepResult:
        return self.result


def works_of(plan: StepPlan) -> list[SequenceWork]:
    """All rows of a plan as structs. Of decodes it says what columns do not: that they need
    nothing else."""
    decodes = plan.decodes
    works = []
    for index, rid in enumerate(decodes.rids):
        temperature, top_p, min_p = decodes.rules[:, index].tolist()
        params = SamplingParams(
            temperature=temperature, top_p=top_p, min_p=min_p, top_k=int(decodes.top_k[index])
        )
        num_generated, start = int(decodes.num_generated[index]), int(decodes.starts[index])
        sample = SampleWork(
            params, int(decodes.seeds[index]), num_generated, (), start + 1 - num_generated
        )
        token_id, pages = int(decodes.token_ids[index]), decodes.pages(index)
        works.append(SequenceWork(rid, array("i", (token_id,)), start, pages, sample))
    return [*works, *plan.sequences]


def as_decodes(works: Sequence[SequenceWork]) -> Decodes:
    """Works of one token each as columns."""
    samples = [work.sample for work in works if work.sample]
    assert len(samples) == len(works)
    rules = [sampling_rules(sample.params) for sample in samples]
    table = np.zeros((len(works), max(len(work.pages) for work in works)), np.int32)
    for row, work in zip(table, works, strict=True):
        row[: len(work.pages)] = work.pages
    return Decodes(
        owners=np.array(works, np.object_),
        token_ids=np.array([token_id for work in works for token_id in work.token_ids]),
        starts=np.array([work.start for work in works]),
        page_table=table[:, : pages_for(max(work.num_kv_tokens for work in works))],
        seeds=np.array([sample.seed for sample in samples], np.uint64),
        num_generated=np.array([sample.num_generated for sample in samples]),
        rules=np.array([rule[:3] for rule in rules], np.float32).T,
        top_k=np.array([rule[3] for rule in rules]),
    )


class Token(NamedTuple):
    """What a sampler gives one row."""

    token_id: int
    logprob: TokenLogprob | None

    @property
    def is_finite(self) -> bool:
        return self.token_id >= 0


def tokens_of(
    sampler: Callable[..., Any],
    logits: Any,
    works: Sequence[SampleWork],
    masks: Callable[[], Masks | None] | None = None,
    *,
    num_decodes: int = 0,
) -> list[Token]:
    """Runs a sampler on a copy of `logits`; the first `num_decodes` rows are columns."""
    each = [SequenceWork("", array("i", (0,)), 0, (0,), work) for work in works]
    decodes = as_decodes(each[:num_decodes]) if num_decodes else NO_DECODES
    plan = StepPlan(tuple(each[num_decodes:]), decodes)
    result = sampler(logits.clone(), plan, masks).wait()
    ids = result.token_ids.tolist()
    return [Token(token_id, result.logprobs.get(row)) for row, token_id in enumerate(ids)]


class FakeRunner:
    """`spoiled` rids write garbage and give logits that are not finite. One that leaves them still
    does so as long as it reads what it wrote meanwhile."""

    def __init__(self, num_pages: int) -> None:
        self.slots = [UNWRITTEN] * ((num_pages + 1) * PAGE_TOKENS)
        """The last page is for what `compute` is not to write elsewhere."""
        self.spoiled: set[str] = set()
        self._writer: dict[int, str] = {}
        """Of each slot."""
        self._sampled: list[tuple[str, int]] = []

    def launch(self, plan: StepPlan, masks: Callable[[], Masks | None] | None = None) -> Done:
        for work in works_of(plan):
            self._write(work)
        works = [work for work in works_of(plan) if work.sample]
        banned = _banned(masks() if masks else None)
        sampled = [self._sample(w, banned.get(row, ())) for row, w in enumerate(works)]
        self._sampled = [(w.rid, token_id) for w, token_id in zip(works, sampled, strict=True)]
        logprobs = {
            row: TokenLogprob(token_id, -float(sum(self._past(w))))
            for row, (w, token_id) in enumerate(zip(works, sampled, strict=True))
            if w.sample and w.sample.params.num_logprobs is not None and token_id >= 0
        }
        return Done(StepResult(np.array(sampled, np.int64), logprobs))

    def compute(self, plan: StepPlan) -> None:
        """A step whose tokens are all known, once more."""
        assert not len(plan.decodes)
        for work in plan.sequences:
            self._write(work)

    def _write(self, work: SequenceWork) -> None:
        for position, token_id in enumerate(work.token_ids, work.start):
            if token_id < 0:
                rid, token_id = self._sampled[-1 - token_id]
                assert rid == work.rid, f"{work.rid} gets a token of {rid}"
            slot, is_spoiled = _slot(work, position), work.rid in self.spoiled
            # a token of logits that were not finite is read as 0, as `as_read` does
            self.slots[slot] = SPOILED if is_spoiled else max(token_id, 0)
            self._writer[slot] = work.rid

    def _past(self, work: SequenceWork) -> list[int]:
        return [self.slots[_slot(work, i)] for i in range(work.num_kv_tokens)]

    def _sample(self, work: SequenceWork, masked: Sequence[int]) -> int:
        past = self._past(work)
        assert UNWRITTEN not in past, f"{work.rid} reads a slot nobody wrote"
        spoilt = {self._writer[_slot(work, i)] for i, each in enumerate(past) if each == SPOILED}
        assert spoilt <= {work.rid}, f"{work.rid} reads what a failed request wrote"
        if spoilt or work.rid in self.spoiled:
            return -1
        sample = work.sample
        assert sample is not None
        assert sample.history_ids in ((), tuple(past)), f"{work.rid} has another history"
        assert sample.num_generated == len(past) - sample.num_prompt
        return next_token(past, sample.seed, (*sample.banned_ids, *masked))


def _banned(masks: Masks | None) -> dict[int, list[int]]:
    """Row → tokens that its mask does not allow."""
    if masks is None:
        return {}
    also = set(masks.also)
    return {
        row: [
            i
            for i in range(VOCAB)
            if not masks.words[place * 2 + i // 32] >> i % 32 & 1 and (place, i) not in also
        ]
        for place, row in enumerate(masks.sampled_rows)
    }


class FakeFoundry:
    """Every grammar is ready `delay` looks after it was asked for. "bad" is refused."""

    def __init__(self, delay: int = 0) -> None:
        self.delay = delay
        self.asked: list[str] = []
        self.num_looks = 0
        self.is_stopped = False

    @property
    def num_waiting(self) -> int:
        return 0

    def start(self) -> None:
        pass

    def ask(self, kind: str, text: str) -> int | None:
        self.asked.append(text)
        return None if text == "too many" else len(self.asked) - 1

    def look(self) -> None:
        self.num_looks += 1

    def outcome(self, key: int) -> Compiled | Refused | None:
        if self.num_looks <= self.delay:
            return None
        text = self.asked[key]
        if text == "ours":
            return Refused("it broke", is_ours=True)
        return Refused("it is bad") if text == "bad" else Compiled(key, -1)

    def forget(self, in_use: frozenset[int]) -> None:
        self.in_use = in_use

    def stop(self) -> None:
        self.is_stopped = True


class FakeMaker:
    """Allows two of three tokens, by the sum of those before. Numbers in `slow` are given up."""

    def __init__(self, most_rows: int = 16) -> None:
        self.rows = memoryview(bytearray(most_rows * 2 * 4)).cast("i")
        self.token_ids: dict[int, list[int]] = {}
        self.slow: set[int] = set()
        self.num_opened = 0

    @property
    def keys(self) -> frozenset[int]:
        return frozenset()

    def prepare(self, compiled: Compiled) -> bool:
        return True

    def open(self, compiled: Compiled) -> int:
        self.token_ids[self.num_opened] = []
        self.num_opened += 1
        return self.num_opened - 1

    def close(self, number: int) -> None:
        self.token_ids.pop(number, None)

    def fill(self, wanted: list[tuple[int, list[int]]]) -> list[int]:
        for place, (number, ids) in enumerate(wanted):
            known = self.token_ids[number]
            for token_id in ids:
                assert token_id in fake_allowed(known)
                known.append(token_id)
            words = [0, 0]
            for i in fake_allowed(known):
                words[i // 32] |= 1 << i % 32
            for word in range(2):
                self.rows[place * 2 + word] = words[word] - (words[word] >> 31 << 32)
        return [GIVEN_UP if number in self.slow else ALLOWED for number, _ in wanted]

    def stop(self) -> None:
        pass


def fake_allowed(token_ids: Sequence[int]) -> set[int]:
    """What the fake grammar allows next."""
    return {i for i in range(VOCAB) if (i + sum(token_ids)) % 3}


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

    def growths(self, running: Running) -> Ints:
        growths = super().growths(running)
        growths[0] = 0
        return growths


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
    return Request(rid, packed(ids), chosen, priority, key_name)
