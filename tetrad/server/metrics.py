"""Figures for Prometheus: counted per request, read from the engine when scraped.

Counts are kept in the tally that all API processes share, so that any of them shows the sums.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from types import TracebackType
from typing import Literal, Protocol, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

from tetrad.core.errors import CapacityError, RequestError
from tetrad.core.messages import EngineStats
from tetrad.server.tally import FIRST_COUNTER, NUM_COLUMNS, OPEN, UNANSWERED, Tally

Outcome = Literal["success", "cancelled", "failed", "refused"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
OTHER_ROUTE = "other"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)


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

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self.registry = CollectorRegistry()
        self._num_columns = FIRST_COUNTER
        self.first_token = self._histogram(
            "time_to_first_token", "From the request's arrival to its first token.", _SECONDS
        )
        self.per_token = self._histogram(
            "time_per_output_token", "Mean time between tokens after the first.", _TOKEN_SECONDS
        )
        self.whole = self._histogram(
            "request_duration", "From a request's arrival to its last token.", _SECONDS
        )
        self._requests: dict[tuple[str, Outcome], int] = {}
        self.tell_apart((OTHER_ROUTE,))
        self.registry.register(self)

    def tell_apart(self, routes: Iterable[str]) -> None:
        """Count each of these routes by itself. All processes of a server must say the same."""
        for route in routes:
            if (route, OUTCOMES[0]) not in self._requests:
                first = self._columns(len(OUTCOMES))
                self._requests |= {(route, out): first + i for i, out in enumerate(OUTCOMES)}

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> _Histogram:
        first = self._columns(len(bounds) + 2)
        return _Histogram(self.tally, first, f"tetrad_{name}_seconds", text, bounds)

    def _columns(self, num: int) -> int:
        """The first of so many columns that nothing else uses."""
        first = self._num_columns
        self._num_columns += num
        assert self._num_columns <= NUM_COLUMNS, "the tally's rows are too short"
        return first

    def watch(self, engine: WatchedEngine) -> None:
        """Read the engine at each scrape from now on."""
        self.registry.register(_EngineCollector(engine, self.tally))

    def count(self, route: str, outcome: Outcome) -> None:
        """An HTTP request for generation is over."""
        known = route if (route, outcome) in self._requests else OTHER_ROUTE
        self.tally.add(self._requests[known, outcome])

    def refused(self, route: str) -> None:
        """A request was turned away with an HTTP status before it generated anything."""
        self.count(route, "refused")

    def exposition(self) -> bytes:
        """The text format of Prometheus."""
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        """The sums, for the registry."""
        requests = CounterMetricFamily(
            "tetrad_requests",
            "HTTP requests for generation by route and outcome.",
            labels=("route", "outcome"),
        )
        for labels, column in self._requests.items():
            if (num := self.tally.total(column)) > 0:
                requests.add_metric(labels, num)
        yield requests
        for histogram in (self.first_token, self.per_token, self.whole):
            yield histogram.family()


class _Histogram:
    """Columns: how many values fell below each bound but not the one before, those above all, and
    the values' sum."""

    def __init__(
        self, tally: Tally, first: int, name: str, text: str, bounds: Sequence[float]
    ) -> None:
        self._tally = tally
        self._first = first
        self._name = name
        self._text = text
        self._bounds = bounds

    def observe(self, value: float) -> None:
        self._tally.add(self._first + bisect_left(self._bounds, value))
        self._tally.add(self._first + len(self._bounds) + 1, value)

    def family(self) -> HistogramMetricFamily:
        """The sums over all processes."""
        columns = range(self._first, self._first + len(self._bounds) + 2)
        *counts, values_sum = map(self._tally.total, columns)
        names = map(floatToGoString, (*self._bounds, float("inf")))
        buckets = list(zip(names, accumulate(counts), strict=True))
        return HistogramMetricFamily(self._name, self._text, buckets, values_sum)


class RequestWatch:
    """Times one HTTP request; leaving its context counts the outcome.

    A refusal is not counted here but where it becomes an HTTP status, with those that never came
    this far.
    """

    def __init__(self, metrics: Metrics, route: str, num_choices: int) -> None:
        self._metrics = metrics
        self._route = route
        self._arrived_at = time.perf_counter()
        self._first_at: list[float | None] = [None] * num_choices

    def first_token(self, choice: int) -> None:
        now = self._first_at[choice] = time.perf_counter()
        self._metrics.first_token.observe(now - self._arrived_at)

    def last_token(self, choice: int, num_tokens: int) -> None:
        """`num_tokens`: generated in all, the first included."""
        first_at = self._first_at[choice]
        if first_at is not None and num_tokens > 1:
            elapsed_s = time.perf_counter() - first_at
            self._metrics.per_token.observe(elapsed_s / (num_tokens - 1))

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
            self._metrics.whole.observe(time.perf_counter() - self._arrived_at)
            outcome: Outcome = "success"
        elif isinstance(error, RequestError | CapacityError) and not self.has_started:
            return
        else:
            outcome = "failed" if isinstance(error, Exception) else "cancelled"
        self._metrics.count(self._route, outcome)


class _EngineCollector:
    def __init__(self, engine: WatchedEngine, tally: Tally) -> None:
        self._engine = engine
        self._tally = tally

    def collect(self) -> Iterable[Metric]:
        stats = self._engine.stats
        held = stats.used_pages / stats.total_pages if stats.total_pages else 0.0
        gauges: dict[str, tuple[str, float]] = {
            "running_requests": ("Sequences in the engine's steps.", stats.running_requests),
            "waiting_requests": ("Requests the engine has not begun.", stats.waiting_requests),
            "open_requests": ("Engine requests in flight.", self._tally.total(OPEN)),
            "unanswered_requests": (
                "Engine requests in flight without a first token.",
                self._tally.total(UNANSWERED),
            ),
            "cache_usage_ratio": ("Share of cache pages held by live requests.", held),
            "cache_kept_pages": ("Pages kept only for later prefixes.", stats.cached_pages),
            "cache_total_pages": ("Pages of the cache.", stats.total_pages),
            "new_token_ratio": (
                "Of the tokens a request may still get, those that admission expects.",
                stats.new_token_ratio,
            ),
            "generation_tokens_per_second": ("Over the last second.", stats.gen_throughput),
            "engine_silence_seconds": ("Since last heard of.", self._engine.last_beat_age_s),
            "engine_step_age_seconds": ("Of the running step.", self._engine.step_age_s),
        }
        counters: dict[str, tuple[str, float]] = {
            "prompt_tokens": ("Prompt tokens computed or cached.", stats.prompt_tokens_total),
            "cached_tokens": ("Prompt tokens from the prefix cache.", stats.cached_tokens_total),
            "generated_tokens": ("Tokens generated.", stats.generated_tokens_total),
            "preemptions": ("Requests set back for want of memory.", stats.preemptions_total),
            "nonfinite_logits": ("Requests failed by NaN or infinity.", stats.nonfinite_total),
            "engine_steps": ("Forward passes.", stats.steps_total),
        }
        by_worker = GaugeMetricFamily(
            "tetrad_worker_open_requests",
            "Engine requests in flight by API process.",
            labels=("worker",),
        )
        for worker, value in enumerate(self._tally.each(OPEN)):
            by_worker.add_metric((str(worker),), value)
        yield by_worker
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"tetrad_{name}", text, value=value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"tetrad_{name}", text, value=value)
