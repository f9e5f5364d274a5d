"""Which tokens of which sequences one step computes. No torch: plain numbers in, plain data out.

There is no prefill and no decode. Every sequence has *known* tokens (prompt and output) and
*computed* tokens (keys in the cache); a step lets each catch up as far as the token budget goes.
A decode is a sequence one token behind, a chunked prefill one that is many behind, a preempted
request one that fell back to zero.

Service is in order of arrival, and three rules keep it so:

    waiting  ──admit──▶  running        only the first that waits is admitted, and only if pages
       ▲                    │           are to be had for all its known tokens, and for what it and
       │                    │           the others are expected to get (`forecast.py`)
       └──────preempt───────┘           only the last that runs is preempted, to the front

so everyone who runs arrived before everyone who waits, and at most the last one that runs is still
computing its prompt. The oldest can always go on: alone it fits, or it was refused at the door.

A step may be planned before the one before it is applied. Its tokens then count as computed, and
what it samples as one more token that is *pending*: whether that one ends the request shows a step
later, and what was computed for it meanwhile is passed over.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from msgspec.structs import replace

from tetrad.core.errors import RequestError
from tetrad.core.request import Finish, Request, RequestOutput
from tetrad.core.step import (
    PAGE_TOKENS,
    PENDING,
    SampledToken,
    SequenceWork,
    StepPlan,
    StepResult,
)
from tetrad.engine.admission import Limits, check_request
from tetrad.engine.blocks import PagePool, pages_for
from tetrad.engine.forecast import Forecast, peak_pages
from tetrad.engine.prefix import PrefixCache, extend_names
from tetrad.engine.sequence import Sequence

NON_FINITE = (
    "The model gave logits that are not finite for this request, so it was ended; other requests "
    "are not affected."
)


MAX_RETRIES = 3
"""Times that a request begins anew before it fails."""

Planned = list[tuple[Sequence, SequenceWork]]
"""One step: each sequence beside what it computes."""


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    nonfinite: int = 0


class Scheduler:
    """Owns all sequences, the pages and the prefix cache. `draw_seed(n)` seeds the n-th request
    that brings no seed."""

    def __init__(
        self,
        limits: Limits,
        *,
        use_prefix_cache: bool = True,
        draw_seed: Callable[[int], int],
        conservativeness: float = 1.0,
    ) -> None:
        self.limits = limits
        self.cache = PrefixCache(PagePool(limits.num_pages), is_enabled=use_prefix_cache)
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.counters = Counters()
        self.forecast = Forecast(conservativeness)
        self._refused: tuple[Sequence, int] | None = None
        """Who was not let in with how many pages shared, as long as nobody has ended since: growth
        makes no room."""
        self._draw_seed = draw_seed
        self._live: dict[str, Sequence] = {}
        self._planned: deque[Planned] = deque()
        self._num_arrivals = 0

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def num_used_pages(self) -> int:
        """Pages that running sequences hold."""
        return self.limits.num_pages - self.cache.num_available

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError if it can never be served."""
        if request.rid in self._live:
            raise RequestError(f"Request id {request.rid!r} is already running.", param="rid")
        check_request(request, self.limits)
        sampling = request.sampling
        eos_ids = () if sampling.ignore_eos else self.limits.eos_ids
        seed = self._draw_seed(self._num_arrivals) if sampling.seed is None else sampling.seed
        end_ids = frozenset((*eos_ids, *sampling.stop_token_ids))
        sequence = Sequence(request, seed, self._num_arrivals, end_ids)
        self._num_arrivals += 1
        self._live[request.rid] = sequence
        self.waiting.append(sequence)

    def abort(self, rid: str) -> None:
        """Forget a request and free what it holds. An unknown rid is ignored."""
        if sequence := self._live.get(rid):
            self._retire(sequence)

    @property
    def needs_tokens(self) -> bool:
        """Must steps in flight be applied before the next is planned? Penalties count tokens."""
        return any(s.num_pending and s.needs_history for s in self.running)

    def schedule(self) -> StepPlan:
        """Plan the next step; takes the pages it needs. Earlier steps need not be applied yet: what
        they sample is PENDING. Empty if there is no work but to apply them."""
        planned: Planned = []
        budget = self._continue_running(planned, self.limits.step_tokens)
        self._admit_waiting(planned, budget)
        assert planned or self._planned or not self._live, "requests are left but none can go on"
        return self._commit(planned)

    def continue_decode(self) -> StepPlan:
        """Plan one more token for those of the step just planned, without looking at who waits.
        Empty if one of them is not through its prompt, needs its tokens, or would need a page that
        is not free; or if none has a token to go."""
        planned: Planned = []
        last = [(s, work) for s, work in self._planned[-1] if not s.is_spent]
        can_go_on = all(work.sample and not s.needs_history for s, work in self._planned[-1])
        if can_go_on and all(self._has_pages(sequence) for sequence, _ in last):
            for sequence, _ in last:
                _plan(sequence, 1, planned)
        return self._commit(planned)

    def apply(self, result: StepResult) -> list[RequestOutput]:
        """Take in the oldest step that is not applied; one output for each request that got a token
        or ended. Requests that ended meanwhile are passed over."""
        sampled = iter(result.sampled)
        outputs = []
        for sequence, work in self._planned.popleft():
            if work.sample is None:
                continue
            token = next(sampled)
            if self._live.get(work.rid) is sequence:
                sequence.num_pending -= 1
                outputs.append(self._take(sequence, work, token))
        return outputs

    def as_replay(self) -> StepPlan:
        """The oldest step that is not applied, as it can be computed again now: every token known.
        Who no longer has its pages writes to the page behind the last instead."""
        return StepPlan(tuple(self._as_replay(*pair) for pair in self._planned[0]))

    def _as_replay(self, sequence: Sequence, work: SequenceWork) -> SequenceWork:
        known = tuple(sequence.token_ids[work.start : work.num_kv_tokens])
        if sequence.pages[: len(work.pages)] == work.pages and len(known) == len(work.token_ids):
            return replace(work, token_ids=known)
        pages = (self.limits.num_pages,) * len(work.pages)
        return replace(work, token_ids=(0,) * len(work.token_ids), pages=pages)

    def not_finite(self, result: StepResult) -> set[str]:
        """Requests whose logits in the oldest step were not finite and that may begin anew."""
        if all(token.is_finite for token in result.sampled):
            return set()
        sampling = [(sequence, work) for sequence, work in self._planned[0] if work.sample]
        return {
            token.rid
            for (sequence, _), token in zip(sampling, result.sampled, strict=True)
            if not token.is_finite
            and self._live.get(token.rid) is sequence
            and sequence.num_retries < MAX_RETRIES
        }

    def retry(self, rids: Collection[str]) -> None:
        """Let these, of the oldest step, begin anew with the tokens they have. The pages it read
        leave the cache. Everybody who arrived after the first of them is preempted, too, which
        keeps the order."""
        for _, work in self._planned[0]:
            if work.rid in rids:
                self.cache.forget(work.pages)
        while any(sequence.request.rid in rids for sequence in self.running):
            self._preempt_last()
        for index, sequence in enumerate(self.waiting):
            if sequence.request.rid in rids:
                renewed = sequence.renewed()
                self.waiting[index] = self._live[sequence.request.rid] = renewed

    def flush_cache(self) -> bool:
        """Empty the prefix cache, but only when nothing runs or waits."""
        if self._live:
            return False
        self.cache.flush()
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError if a page is lost or held twice, or the queues are out of order."""
        assert not any(s.pages or s.num_computed for s in self.waiting)
        order = [s.arrival for s in (*self.running, *self.waiting)]
        assert order == sorted(order), f"out of the order of arrival: {order}"
        assert sorted(order) == sorted(s.arrival for s in self._live.values())
        in_flight = Counter(id(s) for step in self._planned for s, work in step if work.sample)
        assert all(s.num_pending == in_flight[id(s)] for s in self._live.values())
        self.cache.check([page for s in self.running for page in s.pages])

    def _commit(self, planned: Planned) -> StepPlan:
        """From here on the step's tokens count as computed."""
        if planned:
            self._planned.append(planned)
        return StepPlan(tuple(work for _, work in planned))

    def _continue_running(self, planned: Planned, budget: int) -> int:
        """Plan for those that run, oldest first; returns the budget that is left."""
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            if not sequence.is_spent:
                if not self._has_pages(sequence):
                    self._preempt_last()
                    self.counters.preemptions += 1
                    self.forecast.set_back()
                    continue
                budget -= _plan(sequence, budget, planned)
            index += 1
        return budget

    def _has_pages(self, sequence: Sequence) -> bool:
        """Make sure its known tokens have slots; False if no page is to be had."""
        missing = pages_for(sequence.num_total) - len(sequence.pages)
        if missing <= 0:
            return True
        if missing > self.cache.num_available:
            return False
        sequence.pages += tuple(self.cache.allocate(missing))
        return True

    def _preempt_last(self) -> None:
        sequence = self.running.pop()
        self.cache.release(sequence.forget_computed())
        sequence.num_preemptions += 1
        self._refused = None
        self.waiting.appendleft(sequence)

    def _admit_waiting(self, planned: Planned, budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_running_requests:
            if not self._admit(self.waiting[0]):
                break
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            budget -= _plan(sequence, budget, planned)

    def _admit(self, sequence: Sequence) -> bool:
        """Give it pages for all known tokens, those of a cached prefix shared. Leaves one page for
        each that runs, since each will soon need one: admitting into them would only preempt. For
        the same reason what a step preempts does not come back in that step, and nobody comes in
        whom the others' growth would set back."""
        if sequence.num_pending:  # preempted with a token on its way
            return False
        found = self._find_prefix(sequence)
        missing = pages_for(sequence.num_known) - len(found)
        available = self.cache.num_available - self.cache.num_idle_among(found)
        if missing + len(self.running) > available:
            return False
        if self.running and (sequence, len(found)) == self._refused:
            return False
        if self.running and self._peak_with(sequence, len(found)) > available:
            self._refused = (sequence, len(found))
            return False
        self.cache.share(found)
        sequence.pages = (*found, *self.cache.allocate(missing))
        sequence.num_kept = sequence.num_shared = len(found)
        sequence.num_computed = len(found) * PAGE_TOKENS
        if sequence.num_cached_prompt is None:
            sequence.num_cached_prompt = sequence.num_computed
            self.counters.prompt_tokens += sequence.num_prompt
            self.counters.cached_tokens += sequence.num_computed
        return True

    def _peak_with(self, newcomer: Sequence, num_found: int) -> int:
        """Most pages beyond those held now, if it ran beside the others."""
        growth = self.forecast.growth
        return peak_pages([*map(growth, self.running), growth(newcomer, num_found)])

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        """Cached pages of its known tokens. Never all of them: the last token is always computed,
        since its logits are wanted."""
        if not self.cache.is_enabled:
            return []
        num_tokens = sequence.num_known - 1
        extend_names(sequence.page_names, sequence.token_ids, num_tokens)
        return self.cache.find(sequence.page_names[: num_tokens // PAGE_TOKENS])

    def _take(self, sequence: Sequence, work: SequenceWork, token: SampledToken) -> RequestOutput:
        """One sampled token: grow, keep full pages, end if it is time."""
        if not token.is_finite:
            return self._fail(sequence, work)
        sequence.token_ids.append(token.token_id)
        self.counters.generated_tokens += 1
        if work.num_kv_tokens >= (sequence.num_kept + 1) * PAGE_TOKENS:
            self._keep_full_pages(sequence, work)
        finish = _finish(sequence, token.token_id)
        if finish:
            self.forecast.finished(sequence)
            self._retire(sequence)
        return _output(sequence, token, finish)

    def _keep_full_pages(self, sequence: Sequence, work: SequenceWork) -> None:
        """Offer the full pages that a step computed to the prefix cache. Called only after finite
        logits, which vouch for the keys they were computed from. A sequence that was preempted
        since has none."""
        num_full = min(work.num_kv_tokens, sequence.num_computed) // PAGE_TOKENS
        if num_full <= sequence.num_kept or not self.cache.is_enabled:
            return
        extend_names(sequence.page_names, sequence.token_ids, num_full * PAGE_TOKENS)
        for index in range(sequence.num_kept, num_full):
            self.cache.keep(sequence.page_names[index], sequence.pages[index])
        sequence.num_kept = num_full

    def _fail(self, sequence: Sequence, work: SequenceWork) -> RequestOutput:
        """End it with an error. The pages the step read leave the cache, also those it found there:
        any of them may hold the number that spoiled its logits."""
        self.counters.nonfinite += 1
        self.cache.forget(work.pages)
        self._retire(sequence)
        return _output(sequence, None, Finish("error", message=NON_FINITE))

    def _retire(self, sequence: Sequence) -> None:
        """Let it go, and its pages: what steps in flight write there comes before what later steps
        write, as the device computes them in order."""
        (self.running if sequence.pages else self.waiting).remove(sequence)
        self._refused = None
        del self._live[sequence.request.rid]
        self.cache.release(sequence.forget_computed())


def _plan(sequence: Sequence, budget: int, planned: Planned) -> int:
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


def _finish(sequence: Sequence, token_id: int) -> Finish | None:
    if token_id in sequence.end_ids:
        return Finish("stop", matched_token=token_id)
    if len(sequence.token_ids) >= sequence.most_tokens:
        return Finish("length")
    return None


def _output(sequence: Sequence, token: SampledToken | None, finish: Finish | None) -> RequestOutput:
    return RequestOutput(
        rid=sequence.request.rid,
        token_ids=(token.token_id,) if token else (),
        logprobs=(token.logprob,) if token and token.logprob else (),
        finish=finish,
        prompt_tokens=sequence.num_prompt,
        cached_tokens=sequence.num_cached_prompt or 0,
        num_preemptions=sequence.num_preemptions,
    )
