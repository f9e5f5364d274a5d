"""Who lives in the engine and what they hold: requests come, get tokens, are set back, and go.

`scheduler.py` plans steps; here is what becomes of them. A step may be planned before the one
before it is applied, so a request may have ended, or given up its pages, when its token comes.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from msgspec.structs import replace

from tetrad.core.errors import RequestError
from tetrad.core.limits import Limits
from tetrad.core.plan import Ints, StepPlan, StepResult
from tetrad.core.request import Finish, Request, RequestOutput, TokenLogprob
from tetrad.core.step import IN_PAGE, PAGE_TOKENS, SequenceWork
from tetrad.engine.admission import end_ids
from tetrad.engine.blocks import PagePool, pages_for
from tetrad.engine.forecast import Forecast, Outlook
from tetrad.engine.gains import ALL, StepGain
from tetrad.engine.line import WaitingLine
from tetrad.engine.prefix import PrefixCache
from tetrad.engine.running import Running
from tetrad.engine.sequence import Sequence
from tetrad.engine.work import PlannedStep, finish_of, output_of

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
    displacements: int = 0
    """Of the preemptions, those for a request of a higher priority."""
    nonfinite: int = 0

    @property
    def shortages(self) -> int:
        """Preemptions because pages ran out."""
        return self.preemptions - self.displacements


class Ledger:
    """All requests of an engine, those that run and those that wait."""

    def __init__(
        self,
        limits: Limits,
        draw_seed: Callable[[int], int],
        conservativeness: float,
        *,
        use_prefix_cache: bool,
    ) -> None:
        self.limits = limits
        self.cache = PrefixCache(PagePool(limits.num_pages), is_enabled=use_prefix_cache)
        self.running = Running(limits)
        self.waiting = WaitingLine()
        self.counters = Counters()
        self.forecast = Forecast(conservativeness)
        self._refused: tuple[Sequence, int] | None = None
        """Who was not let in with how many pages shared, as long as nobody has ended since: growth
        makes no room."""
        self._outlook: Outlook | None = None
        """Of those that run, once a step has asked for it."""
        self._draw_seed = draw_seed
        self._live: dict[str, Sequence] = {}
        self._own_rids: set[str] = set()
        self._planned: deque[PlannedStep] = deque()
        self._ended: list[Sequence] = []
        """By the step that is being applied: they go together."""
        self._num_arrivals = 0

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def num_used_pages(self) -> int:
        """Pages that running sequences hold."""
        return self.limits.num_pages - self.cache.num_available

    def check_name(self, own_rid: str) -> None:
        """Raises RequestError if it is taken."""
        if own_rid in self._own_rids:
            raise RequestError(f"Request id {own_rid!r} is already running.", param="rid")

    def add(self, request: Request) -> None:
        """Queue a request, which keeps within the limits. Raises RequestError if its name is
        taken."""
        own_rid, sampling = request.own_rid, request.sampling
        self.check_name(own_rid)
        seed = self._draw_seed(self._num_arrivals) if sampling.seed is None else sampling.seed
        sequence = Sequence(request, seed, self._num_arrivals, end_ids(sampling, self.limits))
        self._num_arrivals += 1
        self._live[request.rid] = sequence
        self._own_rids.add(own_rid)
        self.waiting.add(sequence)

    def abort(self, rid: str) -> None:
        """Forget a request and free what it holds. An unknown rid is ignored."""
        if sequence := self._live.get(rid):
            self._retire([sequence])

    def end(self, rid: str | None) -> list[RequestOutput]:
        """Abort the requests of this rid, or that came with this id, or all; the last output of
        each."""
        ended = [s for s in self._live.values() if rid is None or s.request.is_named(rid)]
        finish = Finish("abort", message=ABORTED)
        outputs = [output_of(sequence, None, finish) for sequence in ended]
        self._retire(ended)
        return outputs

    def set_back(self) -> None:
        """Preempt everybody."""
        while self.running:
            self._preempt_last()

    def apply(self, result: StepResult) -> StepGain:
        """Take in the oldest step that is not applied: what that gave each request that got a token
        or ended. Requests that ended meanwhile are passed over."""
        step = self._planned.popleft()
        num_decodes = len(step.decodes)
        gain = self._take_decodes(step, result.token_ids[:num_decodes])
        sampling = [(sequence, work) for sequence, work in step.works if work.sample]
        token_ids = result.token_ids[num_decodes:].tolist()
        for row, (sequence, work) in enumerate(sampling, num_decodes):
            token_id, logprob = token_ids[row - num_decodes], result.logprobs.get(row)
            if self._lives(sequence):
                read = work.num_kv_tokens, work.pages
                gain.outputs.append(self._take(sequence, *read, token_id, logprob))
        self._retire(self._ended)
        self._ended = []
        return gain

    def as_replay(self) -> StepPlan:
        """The oldest step that is not applied, as it can be computed again now: every token known.
        Who no longer has its pages writes to the page behind the last instead."""
        return StepPlan(tuple(self._as_replay(*pair) for pair in self._planned[0].pairs()))

    def _as_replay(self, sequence: Sequence, work: SequenceWork) -> SequenceWork:
        known = sequence.token_ids[work.start : work.num_kv_tokens]
        if sequence.pages[: len(work.pages)] == work.pages and len(known) == len(work.token_ids):
            return replace(work, token_ids=known)
        pages = (self.limits.num_pages,) * len(work.pages)
        return replace(work, token_ids=array("i", (0,)) * len(work.token_ids), pages=pages)

    def not_finite(self, result: StepResult) -> set[str]:
        """Requests whose logits in the oldest step were not finite and that may begin anew."""
        is_bad = result.token_ids < 0
        if not is_bad.any():
            return set()
        sampling = (sequence for sequence, work in self._planned[0].pairs() if work.sample)
        return {
            sequence.request.rid
            for sequence, is_its in zip(sampling, is_bad.tolist(), strict=True)
            if is_its and self._lives(sequence) and sequence.num_retries < MAX_RETRIES
        }

    def retry(self, rids: Collection[str]) -> None:
        """Let these, of the oldest step, begin anew with the tokens they have. The pages it read
        leave the cache. Everybody who comes after the first of them is preempted, too, which keeps
        the order."""
        for _, work in self._planned[0].pairs():
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
        pairs = [pair for step in self._planned for pair in step.pairs()]
        in_flight = Counter(id(sequence) for sequence, work in pairs if work.sample)
        assert all(s.num_pending == in_flight[id(s)] for s in self._live.values())
        assert self.running.most_pages == sum(pages_for(s.most_tokens) for s in self.running)
        self.cache.check([page for s in self.running for page in s.pages])

    def _preempt_last(self) -> None:
        sequence = self.running.last
        sequence.set_back()
        self.cache.release(self.running.remove([sequence]))
        sequence.num_preemptions += 1
        self._refused = self._outlook = None
        self.waiting.put_back(sequence)

    def _take_decodes(self, step: PlannedStep, token_ids: Ints) -> StepGain:
        """One sampled token for each of a step's decodes. Only those are looked at singly of which
        something else is new, or whose row is another's by now."""
        table, stays, starts = self.running.rows, step.stays, step.decodes.starts
        is_usual = table.serial.take(stays.rows) == stays.serials
        is_usual &= token_ids >= 0
        outputs: list[RequestOutput] = []
        unusual = [] if is_usual.all() else (~is_usual).nonzero()[0].tolist()
        for index in unusual:
            if self._lives(sequence := stays.sequences[index]):
                read = int(starts[index]) + 1, step.decodes.pages(index)
                outputs.append(self._take(sequence, *read, int(token_ids[index]), None))
        usual = is_usual if unusual else ALL
        fills = starts & IN_PAGE == IN_PAGE
        # before the next token takes the place of the page's first
        for index in (fills & is_usual if unusual else fills).nonzero()[0].tolist():
            self._keep_full_pages(stays.sequences[index], int(starts[index]) + 1)
        known = table.add_tokens(stays.rows[usual], token_ids[usual])
        self.counters.generated_tokens += len(token_ids) - len(unusual)
        if unusual:
            known = table.known.take(stays.rows)
        is_first = known == stays.first_told
        is_new = is_first | self.running.may_end(token_ids)
        is_new |= known >= stays.most_tokens
        new = (is_new & is_usual if unusual else is_new).nonzero()[0]
        first = is_first.take(new).tolist()
        told = zip(stays.sequences.take(new), token_ids.take(new).tolist(), first, strict=True)
        for sequence, token_id, is_its_first in told:
            if is_its_first:
                self._keep_full_pages(sequence, sequence.num_known - 1)
            outputs.append(self._told(sequence, token_id, None))
        is_plain = is_usual & ~is_new
        plain = ALL if is_plain.all() else is_plain.nonzero()[0]
        return StepGain(
            outputs=outputs,
            token_ids=token_ids[plain],
            numbers=stays.numbers[plain],
            workers=stays.workers[plain],
            sequences=stays.sequences,
            plain=plain,
        )

    def _take(
        self,
        sequence: Sequence,
        num_kv_tokens: int,
        pages: tuple[int, ...],
        token_id: int,
        logprob: TokenLogprob | None,
    ) -> RequestOutput:
        """One sampled token of a sequence that lives. `num_kv_tokens` and `pages`: what the step
        read."""
        if token_id < 0:
            sequence.drop_token()
            return self._fail(sequence, pages)
        sequence.add_token(token_id)
        self.counters.generated_tokens += 1
        self._keep_full_pages(sequence, min(num_kv_tokens, sequence.num_computed))
        return self._told(sequence, token_id, logprob)

    def _lives(self, sequence: Sequence) -> bool:
        """Steps in flight also compute for those that have ended meanwhile."""
        return self._live.get(sequence.request.rid) is sequence

    def _told(
        self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None
    ) -> RequestOutput:
        """What its client hears of its newest token, which may end it."""
        finish = finish_of(sequence, token_id)
        if finish:
            self.forecast.finished(sequence)
            self._ended.append(sequence)
        return output_of(sequence, token_id, finish, logprob)

    def _keep_full_pages(self, sequence: Sequence, num_kv_tokens: int) -> None:
        """Offer the full pages that a step computed to the prefix cache. Called only after finite
        logits, which vouch for the keys they were computed from. A sequence that was preempted
        since has none."""
        sequence.list_tokens()
        num_full = num_kv_tokens // PAGE_TOKENS
        if num_full <= sequence.num_kept or not self.cache.is_enabled:
            return
        names, pages = sequence.names(num_full), sequence.pages
        for place in range(sequence.num_kept, num_full):
            self.cache.keep(names[place], pages[place])
        sequence.num_kept = num_full

    def _fail(self, sequence: Sequence, pages: tuple[int, ...]) -> RequestOutput:
        """End it with an error. The pages the step read leave the cache, also those it found there:
        any of them may hold the number that spoiled its logits."""
        self.counters.nonfinite += 1
        self.cache.forget(pages)
        self._ended.append(sequence)
        return output_of(sequence, None, Finish("error", message=NON_FINITE))

    def _retire(self, sequences: list[Sequence]) -> None:
        """Let them go, and their pages: what steps in flight write there comes before what later
        steps write, as the device computes them in order."""
        if not sequences:
            return
        self._refused = self._outlook = None
        for sequence in sequences:
            del self._live[sequence.rid]
            self._own_rids.remove(sequence.request.own_rid)
            if not sequence.pages:
                self.waiting.remove(sequence)
        self.cache.release(self.running.remove([s for s in sequences if s.pages]))
