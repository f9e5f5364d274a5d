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
from collections.abc import Callable

import numpy as np

from tetrad.core.limits import Limits
from tetrad.core.plan import Ints, StepPlan
from tetrad.core.step import PAGE_TOKENS
from tetrad.engine.blocks import pages_for
from tetrad.engine.forecast import Outlook
from tetrad.engine.ledger import Ledger
from tetrad.engine.sequence import Sequence
from tetrad.engine.work import PlannedStep, whole_tokens


class Scheduler(Ledger):
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
        super().__init__(limits, draw_seed, conservativeness, use_prefix_cache=use_prefix_cache)
        self._preemption_threshold = preemption_threshold

    @property
    def needs_tokens(self) -> bool:
        """Must steps in flight be applied before the next is planned? Penalties count tokens."""
        return self.running.awaits_tokens

    def schedule(self) -> StepPlan:
        """Plan the next step; takes the pages it needs. Earlier steps need not be applied yet: what
        they sample is pending. Empty if there is no work but to apply them."""
        step = PlannedStep()
        self._outlook = None
        self._displace()
        budget = self._continue_running(step, self.limits.step_tokens)
        self._admit_waiting(step, budget)
        is_stuck = step.is_empty and self._live and not self._planned
        assert not is_stuck, "requests are left but none can go on"
        return self._commit(step)

    def continue_decode(self) -> StepPlan:
        """Plan one more token for those of the step just planned, without looking at who waits.
        Empty if one of them is not through its prompt, needs its tokens, or would need a page that
        is not free; or if none has a token to go."""
        step, last, table = PlannedStep(), self._planned[-1], self.running.rows
        pairs = [(s, work) for s, work in last.works if s.pages]  # still, if applied since
        rows = last.stays.rows
        rows = rows[table.serial.take(rows) == last.stays.serials]
        if all(work.sample and not s.needs_history for s, work in pairs):
            rows = np.concatenate([rows, np.array([s.row for s, _ in pairs], np.int64)])
            total = table.total.take(rows)
            is_left = total < table.most_tokens.take(rows)
            rows, total = rows[is_left], total[is_left]
            is_short = table.is_short_of_pages(rows, total)
            if all(map(self._has_pages, self._short_of_pages(rows[is_short], total[is_short]))):
                behind = total - table.computed.take(rows)
                self._plan(step, rows, total, behind, np.ones_like(rows))
        return self._commit(step)

    def _commit(self, step: PlannedStep) -> StepPlan:
        """From here on the step's tokens count as computed."""
        if not step.is_empty:
            self._planned.append(step)
        return step.commit(self.running.rows)

    def _continue_running(self, step: PlannedStep, budget: int) -> int:
        """Plan for those that run, oldest first; returns the budget that is left."""
        running, table = self.running, self.running.rows
        rows = running.order
        total = table.total.take(rows)
        behind = granted = total - table.computed.take(rows)
        behind[total >= table.most_tokens.take(rows)] = 0
        if behind.sum() > budget:
            granted = np.clip(budget - (behind.cumsum() - behind), 0, behind)
        is_short = table.is_short_of_pages(rows, total) & (granted > 0)
        for sequence in self._short_of_pages(rows[is_short], total[is_short]):
            while sequence.pages and not self._has_pages(sequence):
                self._preempt_last()
                self.counters.preemptions += 1
                self.forecast.set_back()
        if (count := len(running)) < len(rows):
            rows, total, behind, granted = (x[:count] for x in (rows, total, behind, granted))
        self._plan(step, rows, total, behind, granted)
        return budget - int(granted.sum())

    def _plan(
        self, step: PlannedStep, rows: Ints, total: Ints, behind: Ints, granted: Ints
    ) -> None:
        """Let each of `rows` compute as many tokens as it is granted; of `total` it is `behind` as
        many, or more. Those of which there is nothing to say but that they decode come first."""
        table = self.running.rows
        is_plain = (behind == 1) & (total >= table.plain_from.take(rows))
        if granted is not behind:
            is_plain &= granted == 1
        step.decode(table, rows[is_plain])
        for index in ((granted > 0) & ~is_plain).nonzero()[0].tolist():
            step.add(table, table.sequences[rows[index]], int(granted[index]))

    def _short_of_pages(self, rows: Ints, num_tokens: Ints) -> list[Sequence]:
        """Each of `rows` has pages for fewer tokens than it has. Give each one page, if there are
        enough for all; returns those who need more, none of whom decodes then."""
        table = self.running.rows
        if 0 < len(rows) <= self.cache.num_available:
            table.add_page_each(rows, self.cache.allocate(len(rows)))
            rows = rows[table.is_short_of_pages(rows, num_tokens)]
        found: list[Sequence] = table.sequences[rows].tolist()
        return found

    def _has_pages(self, sequence: Sequence) -> bool:
        """Make sure its known tokens have slots; False if no page is to be had."""
        missing = pages_for(sequence.num_total) - len(sequence.pages)
        if missing > 0 and missing <= self.cache.num_available:
            self.running.rows.add_pages(sequence, tuple(self.cache.allocate(missing)))
            missing = 0
        return missing <= 0

    def _displace(self) -> None:
        """Preempt those that run with a much lower priority than the first that waits has, as long
        as it does not fit; none if it would not even without all of them. Before anything of the
        step is planned: the pages are given to others at once."""
        if self._preemption_threshold is None or not self.waiting:
            return
        first = self.waiting.first
        lower = self.running.below(first.request.priority - self._preemption_threshold)
        most_pages = self.cache.num_available + sum(len(s.pages) for s in lower)
        if not lower or pages_for(first.num_known) + len(self.running) - len(lower) > most_pages:
            return
        for _ in lower:
            if self._room_for(first) is not None:
                return
            self._preempt_last()
            self.counters.preemptions += 1
            self.counters.displacements += 1

    def _admit_waiting(self, step: PlannedStep, budget: int) -> None:
        """Whole prompts come last, the longest at the end: attention computes them apart."""
        self._outlook, first = None, len(step.works)
        while self.waiting and budget > 0:
            found = self._room_for(self.waiting.first)
            if found is None:
                break
            sequence = self.waiting.pop_first()
            self._admit(sequence, found)
            budget -= step.add(self.running.rows, sequence, budget)
            self.running.add(sequence)
            if self._outlook is not None:
                self._outlook.add(sequence)
        step.works[first:] = sorted(step.works[first:], key=whole_tokens)

    def _room_for(self, sequence: Sequence) -> list[int] | None:
        """The pages it would share if it came in now; None if it may not. Leaves one page for each
        that runs, since each will soon need one: admitting into them would only preempt. For the
        same reason what a step preempts does not come back in that step, and nobody comes in whom
        the others' growth would set back."""
        if sequence.num_pending or len(self.running) >= self.limits.max_running_requests:
            return None  # pending: preempted with a token on its way
        found = self._find_prefix(sequence)
        missing = pages_for(sequence.num_known) - len(found)
        available = self.cache.num_available
        if found:
            available -= self.cache.num_idle_among(found)
        is_refused = (sequence, len(found)) == self._refused
        if missing + len(self.running) > available or (is_refused and self.running):
            return None
        most_pages = self.running.most_pages + pages_for(sequence.most_tokens)
        if most_pages > self.limits.num_pages and self.running:
            self._outlook = self._outlook or Outlook(self.forecast, self.running)
            if not self._outlook.has_room_for(sequence, len(found), available):
                self._refused = (sequence, len(found))
                return None
        return found

    def _admit(self, sequence: Sequence, found: list[int]) -> None:
        """Give it pages for all known tokens, those found in the cache shared."""
        missing = pages_for(sequence.num_known) - len(found)
        if found:
            self.cache.share(found)
        sequence.pages = (*found, *self.cache.allocate(missing))
        sequence.num_kept = sequence.num_shared = len(found)
        num_cached = len(found) * PAGE_TOKENS
        sequence.compute(num_cached)
        if sequence.num_cached_prompt is None:
            sequence.num_cached_prompt = num_cached
            sequence.queue_s = time.monotonic() - sequence.added_at
            self.counters.prompt_tokens += sequence.num_prompt
            self.counters.cached_tokens += num_cached

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        """Cached pages of its known tokens. Never all of them: the last token is always computed,
        since its logits are wanted."""
        if not self.cache.is_enabled:
            return []
        num_pages = (sequence.num_known - 1) // PAGE_TOKENS
        return self.cache.find(sequence.names(num_pages)[:num_pages])
