"""Which tokens of which sequences one step computes. No torch: plain numbers in, plain data out.

There is no prefill and no decode. Every sequence has *known* tokens (prompt and output) and
*computed* tokens (keys in the cache); a step lets each catch up as far as the token budget goes.
A decode is a sequence one token behind, a chunked prefill one that is many behind, a preempted
request one that fell back to zero.

Service is in order of arrival, and three rules keep it so:

    waiting  ──admit──▶  running        only the first that waits is admitted, and only if pages
       ▲                    │           for all its known tokens are to be had
       └──────preempt───────┘           only the last that runs is preempted, to the front

so everyone who runs arrived before everyone who waits, and at most the last one that runs is still
computing its prompt. The oldest can always go on: alone it fits, or it was refused at the door.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tetrad.core.errors import RequestError
from tetrad.core.request import Finish, Request, RequestOutput
from tetrad.core.step import PAGE_TOKENS, SampledToken, SequenceWork, StepPlan, StepResult
from tetrad.engine.admission import Limits, check_request
from tetrad.engine.blocks import PagePool, pages_for
from tetrad.engine.prefix import PrefixCache, extend_names
from tetrad.engine.sequence import Sequence

NON_FINITE = (
    "The model gave logits that are not finite for this request, so it was ended; other requests "
    "are not affected."
)


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
        self, limits: Limits, *, use_prefix_cache: bool = True, draw_seed: Callable[[int], int]
    ) -> None:
        self.limits = limits
        self.cache = PrefixCache(PagePool(limits.num_pages), is_enabled=use_prefix_cache)
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.counters = Counters()
        self._draw_seed = draw_seed
        self._live: dict[str, Sequence] = {}
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
            if sequence in self.waiting:
                self.waiting.remove(sequence)
                del self._live[rid]
            else:
                self._retire(sequence)

    def schedule(self) -> StepPlan:
        """Plan the next step; takes the pages it needs. Empty only if there is no work."""
        work: list[SequenceWork] = []
        budget = self._continue_running(work, self.limits.step_tokens)
        self._admit_waiting(work, budget)
        assert work or not self._live, "requests are left but none can go on"
        return StepPlan(tuple(work))

    def apply(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Take in what the step computed; one output for each request that got a token or ended.
        Requests that were aborted meanwhile are passed over."""
        sampled = iter(result.sampled)
        outputs = []
        for work in plan.sequences:
            token = next(sampled) if work.sample else None
            sequence = self._live.get(work.rid)
            if sequence is None:
                continue
            sequence.num_computed = work.num_kv_tokens
            if token is not None:
                outputs.append(self._take(sequence, token))
        return outputs

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
        self.cache.check([page for s in self.running for page in s.pages])

    def _continue_running(self, work: list[SequenceWork], budget: int) -> int:
        """Plan for those that run, oldest first; returns the budget that is left."""
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            if not self._has_pages(sequence):
                self._preempt_last()
                continue
            work.append(_work(sequence, budget))
            budget -= len(work[-1].token_ids)
            index += 1
        return budget

    def _has_pages(self, sequence: Sequence) -> bool:
        """Make sure its known tokens have slots; False if no page is to be had."""
        missing = pages_for(sequence.num_known) - len(sequence.pages)
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
        self.counters.preemptions += 1
        self.waiting.appendleft(sequence)

    def _admit_waiting(self, work: list[SequenceWork], budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_running_requests:
            if not self._admit(self.waiting[0]):
                break
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            work.append(_work(sequence, budget))
            budget -= len(work[-1].token_ids)

    def _admit(self, sequence: Sequence) -> bool:
        """Give it pages for all known tokens, those of a cached prefix shared. Leaves one page for
        each that runs, since each will soon need one: admitting into them would only preempt. For
        the same reason what a step preempts does not come back in that step."""
        found = self._find_prefix(sequence)
        missing = pages_for(sequence.num_known) - len(found)
        available = self.cache.num_available - self.cache.num_idle_among(found)
        if missing + len(self.running) > available:
            return False
        self.cache.share(found)
        sequence.pages = (*found, *self.cache.allocate(missing))
        sequence.num_kept = len(found)
        sequence.num_computed = len(found) * PAGE_TOKENS
        if sequence.num_cached_prompt is None:
            sequence.num_cached_prompt = sequence.num_computed
            self.counters.prompt_tokens += sequence.num_prompt
            self.counters.cached_tokens += sequence.num_computed
        return True

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        """Cached pages of its known tokens. Never all of them: the last token is always computed,
        since its logits are wanted."""
        if not self.cache.is_enabled:
            return []
        num_tokens = sequence.num_known - 1
        extend_names(sequence.page_names, sequence.token_ids, num_tokens)
        return self.cache.find(sequence.page_names[: num_tokens // PAGE_TOKENS])

    def _take(self, sequence: Sequence, token: SampledToken) -> RequestOutput:
        """One sampled token: grow, keep full pages, end if it is time."""
        if not token.is_finite:
            return self._fail(sequence)
        sequence.token_ids.append(token.token_id)
        self.counters.generated_tokens += 1
        self._keep_full_pages(sequence)
        finish = _finish(sequence, token.token_id)
        if finish:
            self._retire(sequence)
        return _output(sequence, token, finish)

    def _keep_full_pages(self, sequence: Sequence) -> None:
        """Offer computed full pages to the prefix cache. Called only after finite logits, which
        vouch for the keys they were computed from."""
        num_full = sequence.num_computed // PAGE_TOKENS
        if num_full == sequence.num_kept or not self.cache.is_enabled:
            return
        extend_names(sequence.page_names, sequence.token_ids, sequence.num_computed)
        for index in range(sequence.num_kept, num_full):
            self.cache.keep(sequence.page_names[index], sequence.pages[index])
        sequence.num_kept = num_full

    def _fail(self, sequence: Sequence) -> RequestOutput:
        """End it with an error. Its pages leave the cache, also those it found there: any of them
        may hold the number that spoiled its logits."""
        self.counters.nonfinite += 1
        self.cache.forget(sequence.pages)
        self._retire(sequence)
        return _output(sequence, None, Finish("error", message=NON_FINITE))

    def _retire(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        del self._live[sequence.request.rid]
        self.cache.release(sequence.forget_computed())


def _work(sequence: Sequence, budget: int) -> SequenceWork:
    start = sequence.num_computed
    token_ids = tuple(sequence.token_ids[start : start + budget])
    is_caught_up = start + len(token_ids) == sequence.num_known
    return SequenceWork(
        rid=sequence.request.rid,
        token_ids=token_ids,
        start=start,
        pages=sequence.pages,
        sample=sequence.sample_work() if is_caught_up else None,
    )


def _finish(sequence: Sequence, token_id: int) -> Finish | None:
    if token_id in sequence.end_ids:
        return Finish("stop", matched_token=token_id)
    if sequence.num_generated >= sequence.request.sampling.max_new_tokens:
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
