"""Figures for Prometheus: counted per request, read from the engine when scraped."""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import TracebackType
from typing import Literal, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from tetrad.core.errors import CapacityError, RequestError
from tetrad.core.messages import EngineStats

Outcome = Literal["success", "cancelled", "failed", "refused"]

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


class WatchedDoor(Protocol):
    """What is read of the API process at each scrape."""

    open_requests: int
    unanswered_requests: int


class Metrics:
    """One registry per API process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "tetrad_requests",
            "HTTP requests for generation by route and outcome.",
            ("route", "outcome"),
            registry=self.registry,
        )
        self.first_token = self._histogram(
            "time_to_first_token", "From the request's arrival to its first token.", _SECONDS
        )
        self.per_token = self._histogram(
            "time_per_output_token", "Mean time between tokens after the first.", _TOKEN_SECONDS
        )
        self.whole = self._histogram(
            "request_duration", "From a request's arrival to its last token.", _SECONDS
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"tetrad_{name}_seconds", text, buckets=buckets, registry=self.registry)

    def watch(self, engine: WatchedEngine, door: WatchedDoor) -> None:
        """Read these at each scrape from now on."""
        self.registry.register(_EngineCollector(engine, door))

    def refused(self, route: str) -> None:
        """A request was turned away with an HTTP status before it generated anything."""
        self.requests.labels(route, "refused").inc()

    def exposition(self) -> bytes:
        """The text format of Prometheus."""
        return generate_latest(self.registry)


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
        self._metrics.requests.labels(self._route, outcome).inc()


class _EngineCollector:
    def __init__(self, engine: WatchedEngine, door: WatchedDoor) -> None:
        self._engine = engine
        self._door = door

    def collect(self) -> Iterable[Metric]:
        stats = self._engine.stats
        held = stats.used_pages / stats.total_pages if stats.total_pages else 0.0
        gauges: dict[str, tuple[str, float]] = {
            "running_requests": ("Sequences in the engine's steps.", stats.running_requests),
            "waiting_requests": ("Requests the engine has not begun.", stats.waiting_requests),
            "open_requests": ("Engine requests in flight.", self._door.open_requests),
            "unanswered_requests": (
                "Engine requests in flight without a first token.",
                self._door.unanswered_requests,
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
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"tetrad_{name}", text, value=value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"tetrad_{name}", text, value=value)
