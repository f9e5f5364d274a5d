"""Which tokens of which sequences one step computes. No torch: plain numbers in, plain data out.

There is no prefill and no decode. Every sequence has *known* tokens (prompt and output) and
*computed* tokens (keys in the cache); a step lets each catch up as far as the token budget goes.
A decode is a sequence one token behind, a chunked prefill one that is many behind, a preempted
request one that fell back to zero.

Service is in the order of `line.py`: of arrival, unless there are priorities or several API keys.
Three rules keep it so:

    waiting  ──admit──▶  running        only the first that waits is admitted, and only if pages
       ▲                    │           are to be had for all its known tokens, and for what it and
       │                    │           the others are expected to get (`forecast.py`)
       └──────preempt───────┘           only the last that runs is preempted, to the front

so everyone who runs comes before everyone who waits with the same priority. The first can always go
on: alone it fits, or it was refused at the door. One that waits with a much higher priority than
others run with has them preempted, from the last on, when that gets it in.

A step may be planned before the one before it is applied. Its tokens then count as computed, and
what it samples as one more token that is *pending*: whether that one ends the request shows a step
later, and what was computed for it meanwhile is passed over.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from msgspec.structs import replace

from tetrad.core.errors import RequestError
from tetrad.core.request import Finish, Request, RequestOutput
from tetrad.core.step import PAGE_TOKENS, SampledToken, SequenceWork, StepPlan, StepResult
from tetrad.engine.admission import Limits, check_request, end_ids
from tetrad.engine.blocks import PagePool, pages_for
from tetrad.engine.forecast import Forecast, Outlook
from tetrad.engine.line import WaitingLine
from tetrad.engine.prefix import PrefixCache, extend_names
from tetrad.engine.sequence import Sequence
from tetrad.engine.work import Planned, finish_of, output_of, plan_work, whole_tokens

NON_FINITE = (
    "The model gave logits that are not finite for this request, so it was ended; other requests "
    "are not affected."
)

ABORTED = "The server's operator ended this request."

MAX_RETRIES = 3
"""Times that a request begins anew before it fails."""


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
        preemption_threshold: int | None = None,
    ) -> None:
        """Who waits with a priority above another's by more than `preemption_threshold` may have it
        set back."""
        self.limits = limits
        self.cache = PrefixCache(PagePool(limits.num_pages), is_enabled=use_prefix_cache)
        self.running: list[Sequence] = []
        self.waiting = WaitingLine()
        self.counters = Counters()
        self.forecast = Forecast(conservativeness)
        self._refused: tuple[Sequence, int] | None = None
        self._outlook: Outlook | None = None  # of those that run, once it has been asked for
        """Who was not let in with how many pages shared, as long as nobody has ended since: growth
        makes no room."""
        self._draw_seed = draw_seed
        self._preemption_threshold = preemption_threshold
        self._live: dict[str, Sequence] = {}
        self._own_rids: set[str] = set()
        self._planned: deque[Planned] = deque()
        self._num_arrivals = 0

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def num_used_pages(self) -> int:
        """Pages that running sequences hold."""
        return self.limits.num_pages - self.cache.num_available

    def check(self, request: Request) -> None:
        """Raises RequestError if it can never be served, or its name is taken."""
        if request.own_rid in self._own_rids:
            raise RequestError(f"Request id {request.own_rid!r} is already running.", param="rid")
        check_request(request, self.limits)

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError if it can never be served."""
        self.check(request)
        sampling = request.sampling
        seed = self._draw_seed(self._num_arrivals) if sampling.seed is None else sampling.seed
        sequence = Sequence(request, seed, self._num_arrivals, end_ids(sampling, self.limits))
        self._num_arrivals += 1
        self._live[request.rid] = sequence
        self._own_rids.add(request.own_rid)
        self.waiting.add(sequence)

    def abort(self, rid: str) -> None:
        """Forget a request and free what it holds. An unknown rid is ignored."""
        if sequence := self._live.get(rid):
            self._retire(sequence)

    def end(self, rid: str | None) -> list[RequestOutput]:
        """Abort the requests of this rid, or that came with this id, or all; the last output of
        each."""
        outputs = []
        for sequence in list(self._live.values()):
            if rid is None or sequence.request.is_named(rid):
                outputs.append(output_of(sequence, None, Finish("abort", message=ABORTED)))
                self._retire(sequence)
        return outputs

    def set_back(self) -> None:
        """Preempt everybody."""
        while self.running:
            self._preempt_last()

    @property
    def needs_tokens(self) -> bool:
        """Must steps in flight be applied before the next is planned? Penalties count tokens."""
        return any(s.num_pending and s.needs_history for s in self.running)

    def schedule(self) -> StepPlan:
        """Plan the next step; takes the pages it needs. Earlier steps need not be applied yet: what
        they sample is PENDING. Empty if there is no work but to apply them."""
        planned: Planned = []
        self._outlook = None
        self._displace()
        budget = self._continue_running(planned, self.limits.step_tokens)
        self._admit_waiting(planned, budget)
        assert planned or self._planned or not self._live, "requests are left but none can go on"
        return self._commit(planned)

    def continue_decode(self) -> StepPlan:
        """Plan one more token for those of the step just planned, without looking at who waits.
        Empty if one of them is not through its prompt, needs its tokens, or would need a page that
        is not free; or if none has a token to go."""
        planned: Planned = []
        running = [(s, work) for s, work in self._planned[-1] if s.pages]  # still, if applied since
        last = [(s, work) for s, work in running if not s.is_spent]
        can_go_on = all(work.sample and not s.needs_history for s, work in running)
        if can_go_on and all(self._has_pages(sequence) for sequence, _ in last):
            for sequence, _ in last:
                plan_work(sequence, 1, planned)
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
        leave the cache. Everybody who comes after the first of them is preempted, too, which keeps
        the order."""
        for _, work in self._planned[0]:
            if work.rid in rids:
                self.cache.forget(work.pages)
        while any(sequence.request.rid in rids for sequence in self.running):
            self._preempt_last()
        for sequence in [s for s in self.waiting if s.request.rid in rids]:
            renewed = self._live[sequence.request.rid] = sequence.renewed()
            self.waiting.replace(sequence, renewed)

    def flush_cache(self) -> bool:
        """Empty the prefix cache, but only when nothing runs or waits."""
        if not self._live:
            self.cache.flush()
        return not self._live

    def check_integrity(self) -> None:
        """Raise AssertionError if a page is lost or held twice, or the queues are out of order."""
        assert not any(s.pages or s.num_computed for s in self.waiting)
        for queue in (self.running, self.waiting):
            places = [s.place for s in queue]
            assert places == sorted(places), f"out of the order of service: {places}"
        order = [s.place for s in (*self.running, *self.waiting)]
        by_priority = sorted(order, key=lambda place: place[0])  # stable
        assert by_priority == sorted(order), f"one that waits comes before one that runs: {order}"
        assert sorted(order) == sorted(s.place for s in self._live.values())
        assert self._own_rids == {s.request.own_rid for s in self._live.values()}
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
                budget -= plan_work(sequence, budget, planned)
            index += 1
        return budget

    def _has_pages(self, sequence: Sequence) -> bool:
        """Make sure its known tokens have slots; False if no page is to be had."""
        missing = pages_for(sequence.num_total) - len(sequence.pages)
        if missing > 0 and missing <= self.cache.num_available:
            sequence.pages += tuple(self.cache.allocate(missing))
            missing = 0
        return missing <= 0

    def _preempt_last(self) -> None:
        sequence = self.running.pop()
        self.cache.release(sequence.forget_computed())
        sequence.num_preemptions += 1
        self._refused = self._outlook = None
        self.waiting.put_back(sequence)

    def _displace(self) -> None:
        """Preempt those that run with a much lower priority than the first that waits has, as long
        as it does not fit; none if it would not even without all of them. Before anything of the
        step is planned: the pages are given to others at once."""
        if self._preemption_threshold is None or not self.waiting:
            return
        first = self.waiting.first
        least = first.request.priority - self._preemption_threshold
        lower = [s for s in self.running if s.request.priority < least]
        most_pages = self.cache.num_available + sum(len(s.pages) for s in lower)
        if not lower or pages_for(first.num_known) + len(self.running) - len(lower) > most_pages:
            return
        for _ in lower:
            if self._room_for(first) is not None:
                return
            self._preempt_last()
            self.counters.preemptions += 1

    def _admit_waiting(self, planned: Planned, budget: int) -> None:
        """Whole prompts come last, the longest at the end: attention computes them apart."""
        self._outlook, first = None, len(planned)
        while self.waiting and budget > 0:
            found = self._room_for(self.waiting.first)
            if found is None:
                break
            sequence = self.waiting.pop_first()
            self._admit(sequence, found)
            insort(self.running, sequence, key=lambda other: other.place)
            budget -= plan_work(sequence, budget, planned)
            if self._outlook is not None:
                self._outlook.add(sequence)
        planned[first:] = sorted(planned[first:], key=whole_tokens)

    def _room_for(self, sequence: Sequence) -> list[int] | None:
        """The pages it would share if it came in now; None if it may not. Leaves one page for each
        that runs, since each will soon need one: admitting into them would only preempt. For the
        same reason what a step preempts does not come back in that step, and nobody comes in whom
        the others' growth would set back."""
        if sequence.num_pending or len(self.running) >= self.limits.max_running_requests:
            return None  # pending: preempted with a token on its way
        found = self._find_prefix(sequence)
        missing = pages_for(sequence.num_known) - len(found)
        available = self.cache.num_available - self.cache.num_idle_among(found)
        is_refused = (sequence, len(found)) == self._refused
        if missing + len(self.running) > available or (is_refused and self.running):
            return None
        if self.running:
            self._outlook = self._outlook or Outlook(self.forecast, self.running)
            if not self._outlook.has_room_for(sequence, len(found), available):
                self._refused = (sequence, len(found))
                return None
        return found

    def _admit(self, sequence: Sequence, found: list[int]) -> None:
        """Give it pages for all known tokens, those found in the cache shared."""
        missing = pages_for(sequence.num_known) - len(found)
        self.cache.share(found)
        sequence.pages = (*found, *self.cache.allocate(missing))
        sequence.num_kept = sequence.num_shared = len(found)
        sequence.num_computed = len(found) * PAGE_TOKENS
        if sequence.num_cached_prompt is None:
            sequence.num_cached_prompt = sequence.num_computed
            sequence.queue_s = time.monotonic() - sequence.added_at
            self.counters.prompt_tokens += sequence.num_prompt
            self.counters.cached_tokens += sequence.num_computed

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
        finish = finish_of(sequence, token.token_id)
        if finish:
            self.forecast.finished(sequence)
            self._retire(sequence)
        return output_of(sequence, token, finish)

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
        return output_of(sequence, None, Finish("error", message=NON_FINITE))

    def _retire(self, sequence: Sequence) -> None:
        """Let it go, and its pages: what steps in flight write there comes before what later steps
        write, as the device computes them in order."""
        (self.running if sequence.pages else self.waiting).remove(sequence)
        self._refused = self._outlook = None
        del self._live[sequence.request.rid]
        self._own_rids.remove(sequence.request.own_rid)
        self.cache.release(sequence.forget_computed())
