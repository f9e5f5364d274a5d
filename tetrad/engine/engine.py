"""The engine: schedule, run, apply."""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Protocol

from tetrad.core.config import ServeConfig
from tetrad.core.errors import CapacityError, RequestError, UserError
from tetrad.core.limits import Limits
from tetrad.core.messages import EngineStats
from tetrad.core.plan import StepPlan, StepResult
from tetrad.core.request import Finish, Request, RequestOutput
from tetrad.engine.admission import check_request
from tetrad.engine.gains import Gains, StepGain
from tetrad.engine.grammars import Grammars, Masks
from tetrad.engine.ledger import ABORTED
from tetrad.engine.scheduler import Scheduler
from tetrad.engine.stream import StreamInterval
from tetrad.engine.uniforms import DrawnSeeds

_log = logging.getLogger(__name__)

RATE_WINDOW_S = 1.0
SETBACKS_EVERY_S = 10.0
SINGLE_STEPS = (
    "--num-continuous-decode-steps has no effect while a request with penalties runs: its next "
    "token cannot be chosen before the last is known."
)


NO_GRAMMARS = (
    "This server constrains no output (--grammar-backend none, or --load-format null): leave out "
    "response_format, tool_choice and the like."
)


class Launched(Protocol):
    """A step that the device computes, or has computed."""

    def wait(self) -> StepResult:
        """Blocks until it is done."""
        ...


class StepRunner(Protocol):
    """Turns a plan into a result: `engine.runner.Runner`, or a fake in tests."""

    def launch(self, plan: StepPlan, masks: Callable[[], Masks | None] | None = None) -> Launched:
        """Start a step, after those launched before. `masks` is called once the model is launched,
        and tells what the sampler must allow; it may wait for the steps before."""
        ...


class Guard(Protocol):
    """Looks into a step that gave logits that are not finite: `engine.guard.NanGuard`."""

    def cure(self, plan: StepPlan, rids: Collection[str]) -> bool:
        """Is there hope for `rids` if they are computed again?"""
        ...


class Profiler(Protocol):
    """Records what steps do: `engine.profiling.TorchProfiler`."""

    def start(self, num_steps: int | None, /) -> None: ...
    def stepped(self) -> None: ...
    def stop(self) -> str: ...


class NoProfiler:
    """Of an engine without a model."""

    def start(self, _num_steps: int | None, /) -> None:
        """Refuses."""
        raise UserError("There is no model here, so there is nothing to profile.")

    def stepped(self) -> None:
        """A step is over."""

    def stop(self) -> str:
        """Refuses."""
        raise UserError("There is no model here, so there is nothing to profile.")


class Engine:
    """One model, its cache and its requests. Not thread-safe, but for `stats`.

    With `overlap` the host plans and launches a step while the device still computes the one
    before, whose tokens it takes in afterwards. With `continuous_steps` above 1 it launches so many
    decode steps at a time. Neither changes what a request gets.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        info: dict[str, Any] | None = None,
        *,
        overlap: bool = True,
        continuous_steps: int = 1,
        stream_interval: int = 1,
        guard: Guard | None = None,
        profiler: Profiler | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self._overlap = overlap
        self._continuous_steps = continuous_steps
        self._stream = StreamInterval(stream_interval)
        self._guard = guard
        self.profiler = profiler or NoProfiler()
        self.is_paused = False
        """Requests come and wait, but no step runs."""
        self.grammars: Grammars | None = None
        """What constrains answers; requests that ask for it are refused without."""
        self._in_flight: deque[Launched] = deque()
        self.info: dict[str, Any] = info or {}
        """What was resolved and chosen at start, for /server_info."""
        self._num_steps = 0
        self._rate = Rate()
        self._setbacks = Setbacks()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def can_step(self) -> bool:
        """Is there work, and may it be done?"""
        return not self.is_paused and self.has_work

    @property
    def limits(self) -> Limits:
        """What it can serve."""
        return self.scheduler.limits

    def add(self, request: Request, *, is_checked: bool = False) -> None:
        """Queue a request; one with a grammar waits for `admit_ready` first. Raises RequestError if
        it can never be served, CapacityError if it cannot be now. `is_checked`: an API process has
        asked `check_request` already."""
        if not is_checked:
            check_request(request, self.limits)
        if self.grammars is not None and request.own_rid in self.grammars:
            raise RequestError(f"Request id {request.own_rid!r} is already running.", param="rid")
        if request.sampling.grammar is None:
            self.scheduler.add(request)
            return
        if self.grammars is None:
            raise RequestError(NO_GRAMMARS, param="response_format")
        self.scheduler.check_name(request.own_rid)
        self.grammars.begin(request)

    def admit_ready(self) -> list[tuple[str, RequestError | CapacityError]]:
        """Queue the requests whose grammars are compiled; who is refused, and why."""
        refused: list[tuple[str, RequestError | CapacityError]] = []
        for request, error in self.grammars.ready() if self.grammars else ():
            if error is None:
                self.scheduler.add(request)
            else:
                refused.append((request.rid, error))
        return refused

    def abort(self, rid: str) -> None:
        """Forget a request and free what it holds. An unknown rid is ignored."""
        self.scheduler.abort(rid)
        self._stream.forget(rid)
        if self.grammars:
            self.grammars.forget(rid)

    def end(self, rid: str | None) -> Gains:
        """Abort requests by their rid or that of the HTTP request they came with, or all; returns
        what their clients are told, each once."""
        outputs = self.scheduler.end(rid)
        if self.grammars:
            self.grammars.take(outputs)
            finish = Finish("abort", message=ABORTED)
            outputs += [RequestOutput(one, (), finish=finish) for one in self.grammars.end(rid)]
        return self._stream.release(Gains([StepGain(outputs)]))

    def pause(self) -> Gains:
        """Run no more steps; what those in flight gave."""
        self.is_paused = True
        return self._stream.release(self._take_in(0))

    def resume(self) -> None:
        """Go on after a pause."""
        self.is_paused = False

    def set_back(self) -> None:
        """Take everybody's pages: they compute anew what they had, and give the same tokens."""
        self.scheduler.set_back()

    def step(self) -> Gains:
        """Launch a step, or several, and take in those before; what that gave each request that got
        tokens or ended. Empty after a pause: the first tokens come with the next call."""
        if not self.has_work:
            return Gains()
        gains = self._take_in(0) if self.scheduler.needs_tokens else Gains()
        num_launched = self._launch(gains)
        self._setbacks.tell(self.scheduler.counters.shortages)
        gains.steps += self._take_in(num_launched if self._overlap else 0).steps
        self._rate.count(len(gains))
        self.profiler.stepped()
        return self._stream.release(gains)

    def _launch(self, gains: Gains) -> int:
        """Plan and start steps; returns how many. None where requests only wait for tokens that are
        on their way. What steps gave that had to be waited for is added to `gains`."""
        plan, num_launched = self.scheduler.schedule(), 0
        while plan.num_rows:
            self._in_flight.append(self._start(plan, gains))
            num_launched += 1
            if num_launched == self._continuous_steps:
                break
            plan = self.scheduler.continue_decode()
            if not plan.num_rows and self.scheduler.needs_tokens:
                _tell_once(SINGLE_STEPS)
        self._num_steps += num_launched
        return num_launched

    def _start(self, plan: StepPlan, gains: Gains) -> Launched:
        """Launch a step. What a grammar allows depends on the tokens of the steps before: they are
        waited for when the model is under way already."""
        grammars = self.grammars
        if grammars is None or not grammars.concern(plan):
            return self.runner.launch(plan)

        def masks() -> Masks | None:
            gains.steps += self._take_in(0).steps
            found, failed = grammars.masks(plan)
            for rid, reason in failed.items():
                self.scheduler.abort(rid)  # what is held of it goes out with its end
                grammars.forget(rid)
                output = RequestOutput(rid, (), finish=Finish("error", message=reason))
                gains.steps.append(StepGain([output]))
            return found

        return self.runner.launch(plan, masks)

    def _take_in(self, num_left: int) -> Gains:
        """Wait for the oldest steps, until `num_left` are in flight."""
        gains = Gains()
        while len(self._in_flight) > num_left:
            result = self._in_flight.popleft().wait()
            self._cure(result)
            gained = self.scheduler.apply(result)
            if self.grammars:
                self.grammars.take(gained.outputs)
            gains.steps.append(gained)
        return gains

    def _cure(self, result: StepResult) -> None:
        """Have requests whose logits were not finite computed again, if that may help."""
        bad = self.scheduler.not_finite(result)
        if bad and self._guard and self._guard.cure(self.scheduler.as_replay(), bad):
            self.scheduler.retry(bad)

    def flush_cache(self) -> bool:
        """Empty the prefix cache; False, and nothing done, while anything runs or waits."""
        return self.scheduler.flush_cache()

    def check_integrity(self) -> None:
        """Raise AssertionError with a drawing if a page is lost, held twice or out of order."""
        self.scheduler.check_integrity()

    @property
    def awaits_grammars(self) -> bool:
        """Do requests wait for grammars that are compiled elsewhere?"""
        return self._num_without_grammar > 0

    @property
    def _num_without_grammar(self) -> int:
        return self.grammars.num_waiting if self.grammars else 0

    def stats(self) -> EngineStats:
        """A reading for heartbeats and metrics."""
        scheduler, counters = self.scheduler, self.scheduler.counters
        return EngineStats(
            running_requests=len(scheduler.running),
            waiting_requests=len(scheduler.waiting) + self._num_without_grammar,
            used_pages=scheduler.num_used_pages,
            cached_pages=scheduler.cache.num_idle,
            total_pages=scheduler.limits.num_pages,
            prompt_tokens_total=counters.prompt_tokens,
            cached_tokens_total=counters.cached_tokens,
            generated_tokens_total=counters.generated_tokens,
            preemptions_total=counters.preemptions,
            new_token_ratio=scheduler.forecast.share,
            nonfinite_total=counters.nonfinite,
            steps_total=self._num_steps,
            gen_throughput=self._rate.per_s(),
        )


def scheduler_of(config: ServeConfig, limits: Limits) -> Scheduler:
    """As a configuration says."""
    threshold = config.priority_scheduling_preemption_threshold
    return Scheduler(
        limits,
        use_prefix_cache=not config.disable_radix_cache,
        draw_seed=DrawnSeeds(config.random_seed),
        conservativeness=config.schedule_conservativeness,
        preemption_threshold=threshold if config.enable_priority_scheduling else None,
    )


class Setbacks:
    """Tells in the log that requests were preempted for want of pages, now and then."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told = 0
        self._told_at = -SETBACKS_EVERY_S

    def tell(self, total: int) -> None:
        """`total`: since the start."""
        if total == self._told or self._clock() - self._told_at < SETBACKS_EVERY_S:
            return
        _log.warning(
            "requests were preempted %d times because the cache's pages ran out, %d times since "
            "the start; they start again when there is room (lower --max-running-requests to admit "
            "fewer)",
            total - self._told,
            total,
        )
        self._told, self._told_at = total, self._clock()


class Rate:
    """Tokens per second over the last full window; 0 after a longer silence."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._opened_at = clock()
        self._num_tokens = 0
        self._last = 0.0

    def count(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        elapsed_s = self._clock() - self._opened_at
        if elapsed_s >= RATE_WINDOW_S:
            self._last = self._num_tokens / elapsed_s
            self._opened_at += elapsed_s
            self._num_tokens = 0

    def per_s(self) -> float:
        is_silent = self._clock() - self._opened_at > 2 * RATE_WINDOW_S
        return 0.0 if is_silent else self._last


@functools.cache
def _tell_once(sentence: str) -> None:
    _log.info(sentence)
