"""Figures for Prometheus: counted per request, read from the engine when scraped.

Counts are kept in the tally that all API processes share, so that any of them shows the sums.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import TracebackType
from typing import Literal, Protocol, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from tetrad.core.errors import CapacityError, RequestError
from tetrad.core.messages import EngineStats
from tetrad.core.request import RequestOutput
from tetrad.server.door.arrival import arrival
from tetrad.server.shared.tally import (
    FIRST_COUNTER,
    NUM_COLUMNS,
    OPEN,
    UNANSWERED,
    UNANSWERED_TOKENS,
    Tally,
)
from tetrad.server.telemetry.histograms import SECONDS, TOKEN_SECONDS, TOKENS, Histogram
from tetrad.server.telemetry.metric_names import HISTOGRAMS, Labels, families

Outcome = Literal["success", "cancelled", "failed", "refused"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
FINISHES = ("stop", "length", "tool_calls", "abort", "error")


class WatchedEngine(Protocol):
    """What is read of the engine at each scrape."""

    @property
    def stats(self) -> EngineStats: ...
    @property
    def last_beat_age_s(self) -> float: ...
    @property
    def step_age_s(self) -> float: ...


class Metrics:
    """What one API process counts, and the sums over all of them."""

    def __init__(self, tally: Tally, model: str = "") -> None:
        """`model`: its name, with which the names of others are labelled."""
        self.tally = tally
        self.labels = Labels(model)
        self.registry = CollectorRegistry()
        self._num_columns = FIRST_COUNTER
        self._histograms: dict[str, Histogram] = {}
        add = self._histogram
        self.first_token = add(
            "time_to_first_token_seconds",
            "Seconds from a sequence's submission to its first token.",
        )
        self.per_token = add(
            "time_per_output_token_seconds",
            "Mean seconds between the tokens of a sequence, after its first.",
            TOKEN_SECONDS,
        )
        self.whole = add("request_duration_seconds", "Seconds that a successful HTTP request took.")
        self.sequence = add(
            "sequence_duration_seconds", "Seconds from a sequence's submission to its end."
        )
        self.queue = add("queue_seconds", "Seconds that a sequence was queued before it first ran.")
        self.prefill = add("prefill_seconds", "Seconds from a sequence's start to its first token.")
        self.decode = add("decode_seconds", "Seconds from a sequence's first token to its last.")
        self.prompt_tokens = add("request_prompt_tokens", "Tokens of a sequence's prompt.", TOKENS)
        self.generated = add("request_generated_tokens", "Tokens of a finished sequence.", TOKENS)
        self._requests: dict[tuple[str, Outcome], int] = {}
        first = self._columns(len(FINISHES))
        self._finishes = {name: first + i for i, name in enumerate(FINISHES)}
        self._timeouts = self._columns(1)
        self.registry.register(self)

    def tell_apart(self, routes: Iterable[str]) -> None:
        """Count what becomes of the requests of each of these routes, and of no others. All
        processes of a server must say the same."""
        for route in routes:
            if (route, OUTCOMES[0]) not in self._requests:
                first = self._columns(len(OUTCOMES))
                self._requests |= {(route, out): first + i for i, out in enumerate(OUTCOMES)}

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...] = SECONDS) -> Histogram:
        first = self._columns(len(bounds) + 2)
        self._histograms[name] = histogram = Histogram(self.tally, first, text, bounds)
        return histogram

    def _columns(self, num: int) -> int:
        """The first of so many columns that nothing else uses."""
        first = self._num_columns
        self._num_columns += num
        assert self._num_columns <= NUM_COLUMNS, "the tally's rows are too short"
        return first

    def watch(self, engine: WatchedEngine) -> None:
        """Read the engine at each scrape from now on."""
        self.registry.register(_EngineCollector(engine, self.tally, self.labels))

    def count(self, route: str, outcome: Outcome) -> None:
        """An HTTP request is over."""
        if (column := self._requests.get((route, outcome))) is not None:
            self.tally.add(column)

    def refused(self, route: str) -> None:
        """A request was turned away with an HTTP status before it generated anything."""
        self.count(route, "refused")

    def finished(self, reason: str, num: int = 1) -> None:
        """A sequence has ended, or so many."""
        self.tally.add(self._finishes[reason], num)

    def timed_out(self) -> None:
        """A request's time was up."""
        self.tally.add(self._timeouts)

    def exposition(self) -> bytes:
        """The text format of Prometheus."""
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        """The sums, for the registry."""
        requests = CounterMetricFamily(
            "tetrad_requests",
            "HTTP requests to the routes that generate, by route and outcome.",
            labels=("route", "outcome"),
        )
        for labels, column in self._requests.items():
            if (num := self.tally.total(column)) > 0:
                requests.add_metric(labels, num)
        yield requests
        yield CounterMetricFamily(
            "tetrad_request_timeouts",
            "HTTP requests that exceeded their time limit.",
            value=self.tally.total(self._timeouts),
        )
        yield from self._ends()
        for ours, histogram in self._histograms.items():
            for name, labelled in self.labels.all_of(ours, *HISTOGRAMS[ours]):
                yield histogram.family(name, labelled)

    def _ends(self) -> Iterable[Metric]:
        counts = {name: self.tally.total(column) for name, column in self._finishes.items()}
        text = "Sequences that have ended, by reason."
        ours = CounterMetricFamily("tetrad_finished", text, labels=("reason",))
        theirs = CounterMetricFamily(
            "vllm:request_success",
            text,
            labels=("model_name", "engine", "finished_reason"),
        )
        for reason, count in counts.items():
            ours.add_metric((reason,), count)
        called = counts["tool_calls"]  # where vLLM says stop
        for reason in ("stop", "length", "abort", "error"):
            count = counts[reason] + (called if reason == "stop" else 0)
            theirs.add_metric((self.labels.model, "0", reason), count)
        label = ("model_name",)
        total = CounterMetricFamily(
            "sglang:num_requests", "Sequences that have ended.", labels=label
        )
        total.add_metric((self.labels.model,), sum(counts.values()))
        aborted = CounterMetricFamily(
            "sglang:num_aborted_requests", "Sequences that were aborted.", labels=label
        )
        aborted.add_metric((self.labels.model,), counts["abort"])
        return ours, theirs, total, aborted


class RequestWatch:
    """Times one HTTP request; leaving its context counts the outcome, and what has not ended by
    then as aborted: its client left, its time was up, or another choice failed.

    A refusal is not counted here but where it becomes an HTTP status, with those that never came
    this far. What it finds is also told to the request's `Arrival`, for log and trace.
    """

    def __init__(self, metrics: Metrics, route: str, num_choices: int) -> None:
        self._metrics = metrics
        self._route = route
        self._arrival = arrival()
        self._arrived_at = self._arrival.handed_over_at = time.monotonic()
        self._begun_at = [self._arrived_at] * num_choices
        self._first_at: list[float | None] = [None] * num_choices
        self._num_open = num_choices

    def begun(self, choice: int) -> None:
        """The engine is given a choice: at once, or when the first of its prompt has a token."""
        self._begun_at[choice] = time.monotonic()

    def first_token(self, choice: int, output: RequestOutput) -> None:
        """A choice has its first token."""
        now = self._first_at[choice] = time.monotonic()
        metrics, told = self._metrics, self._arrival
        since = now - self._begun_at[choice]
        metrics.first_token.observe(since)
        metrics.queue.observe(output.queue_s)
        metrics.prefill.observe(max(0.0, since - output.queue_s))
        metrics.prompt_tokens.observe(output.prompt_tokens)
        told.prompt_tokens += output.prompt_tokens
        told.cached_tokens += output.cached_tokens
        if told.first_token_at is None:
            told.first_token_at, told.queue_s = now, output.queue_s

    def last_token(self, choice: int, num_tokens: int, reason: str) -> None:
        """A choice has ended. `num_tokens`: generated in all, the first included."""
        now, first_at = time.monotonic(), self._first_at[choice]
        self._metrics.sequence.observe(now - self._begun_at[choice])
        if first_at is not None:
            elapsed_s = now - first_at
            self._metrics.decode.observe(elapsed_s)
            if num_tokens > 1:
                self._metrics.per_token.observe(elapsed_s / (num_tokens - 1))
        self._metrics.generated.observe(num_tokens)
        self._metrics.finished(reason)
        self._num_open -= 1
        self._arrival.finish = reason

    def failed(self, error: Exception) -> None:
        """A choice has ended with an error. One that was refused has never been a sequence."""
        self._num_open -= 1
        if not isinstance(error, RequestError | CapacityError):
            self._metrics.finished("error")

    def engine_died(self) -> None:
        """All have, those that had not begun too."""
        self._metrics.finished("error", self._num_open)
        self._num_open = 0

    @property
    def has_started(self) -> bool:
        return any(at is not None for at in self._first_at)

    def __enter__(self) -> RequestWatch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._metrics.whole.observe(time.monotonic() - self._arrived_at)
            outcome: Outcome = "success"
        elif isinstance(error, RequestError | CapacityError) and not self.has_started:
            return
        else:
            outcome = "failed" if isinstance(error, Exception) else "cancelled"
            self._arrival.finish = "error" if outcome == "failed" else "cancelled"
            self._metrics.finished("abort", self._num_open)
        self._metrics.count(self._route, outcome)


class _EngineCollector:
    def __init__(self, engine: WatchedEngine, tally: Tally, labels: Labels) -> None:
        self._engine = engine
        self._tally = tally
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        engine = self._engine
        yield from families(engine.stats, self._labels)
        gauges: dict[str, tuple[str, float]] = {
            "open_requests": (
                "Sequences in flight, queued or running.",
                self._tally.total(OPEN),
            ),
            "unanswered_requests": (
                "Sequences in flight that have no first token yet.",
                self._tally.total(UNANSWERED),
            ),
            "unanswered_prompt_tokens": (
                "Prompt tokens of the sequences that have no first token yet.",
                self._tally.total(UNANSWERED_TOKENS),
            ),
            "engine_silence_seconds": ("Seconds of the engine's silence.", engine.last_beat_age_s),
            "engine_step_age_seconds": ("Seconds the engine's step has run.", engine.step_age_s),
        }
        by_worker = GaugeMetricFamily(
            "tetrad_worker_open_requests",
            "Sequences in flight, by API process.",
            labels=("worker",),
        )
        for worker, value in enumerate(self._tally.each(OPEN)):
            by_worker.add_metric((str(worker),), value)
        yield by_worker
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"tetrad_{name}", text, value=value)
