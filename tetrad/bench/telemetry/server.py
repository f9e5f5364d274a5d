"""The server's own figures, under the names that each server gives them.

Used inside the sampler's process only. Requests go over a connection of their own that stays open.
"""

from __future__ import annotations

import http.client
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S = 10.0
Figures = dict[str, float]
Series = tuple[Mapping[str, str], float]
"""Labels and value of one line of /metrics."""


@dataclass(frozen=True, slots=True)
class Metric:
    """Where a figure stands; the first of `names` that is there is read."""

    figure: str
    names: tuple[str, ...]
    is_mean: bool = False
    """A share: over several engines the mean, not the sum."""


METRICS: dict[str, tuple[Metric, ...]] = {
    "tetrad": (
        Metric("running", ("tetrad_running_requests",)),
        Metric("queued", ("tetrad_waiting_requests",)),
        Metric("cache_usage", ("tetrad_cache_usage_ratio",), is_mean=True),
        Metric("tokens_per_s", ("tetrad_generation_tokens_per_second",)),
        Metric("retractions", ("tetrad_preemptions_total",)),
        Metric("prompt_tokens", ("tetrad_prompt_tokens_total",)),
        Metric("cached_tokens", ("tetrad_cached_tokens_total",)),
        Metric("generated_tokens", ("tetrad_generated_tokens_total",)),
    ),
    "sglang": (
        Metric("running", ("sglang:num_running_reqs",)),
        Metric("queued", ("sglang:num_queue_reqs",)),
        Metric("cache_usage", ("sglang:token_usage",), is_mean=True),
        Metric("tokens_per_s", ("sglang:gen_throughput",)),
        Metric("retractions", ("sglang:num_retracted_requests_total",)),
        Metric("prompt_tokens", ("sglang:prompt_tokens_total",)),
        Metric("cached_tokens", ("sglang:cached_tokens_total",)),
        Metric("generated_tokens", ("sglang:generation_tokens_total",)),
    ),
    "vllm": (
        Metric("running", ("vllm:num_requests_running",)),
        Metric("queued", ("vllm:num_requests_waiting",)),
        Metric("cache_usage", ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"), True),
        Metric("retractions", ("vllm:num_preemptions_total",)),
        Metric("prompt_tokens", ("vllm:prompt_tokens_total",)),
        Metric(
            "looked_up_tokens",
            ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
        ),
        Metric(
            "cached_tokens",
            ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
        ),
        Metric("generated_tokens", ("vllm:generation_tokens_total",)),
    ),
    "llamacpp": (
        Metric("running", ("llamacpp:requests_processing",)),
        Metric("queued", ("llamacpp:requests_deferred",)),
        Metric("cache_usage", ("llamacpp:kv_cache_usage_ratio",), is_mean=True),
        Metric("computed_tokens", ("llamacpp:prompt_tokens_total",)),
        Metric("cached_tokens", ("llamacpp:prompt_tokens_cached_total",)),
        Metric("generated_tokens", ("llamacpp:tokens_predicted_total",)),
    ),
}
"""Each server's names. vLLM counts look-ups in its prefix cache; llama.cpp's prompt tokens are
those that were not in it."""

COUNTERS = (
    *("retractions", "prompt_tokens", "computed_tokens", "cached_tokens", "looked_up_tokens"),
    "generated_tokens",
)
INTERNAL_STATE = {
    "num_running_reqs": "running",
    "num_waiting_reqs": "queued",
    "last_gen_throughput": "tokens_per_s",
}
"""What /server_info tells per engine, for a server that was started without metrics."""


def from_metrics(text: str) -> tuple[str, Figures]:
    """(dialect, figures) of what Prometheus would read; ("", {}) of an unknown server's."""
    for dialect, metrics in METRICS.items():
        wanted = {name for metric in metrics for name in metric.names}
        lines = [line for line in text.splitlines() if _name(line) in wanted]
        if lines:
            try:
                return dialect, _figures(metrics, _samples(lines))
            except ValueError:
                break
    return "", {}


def _name(line: str) -> str:
    return line.split("{", 1)[0].split(" ", 1)[0]


def _samples(lines: Iterable[str]) -> dict[str, list[Series]]:
    found: dict[str, list[Series]] = {}
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, float(sample.value)))
    return found


def _figures(metrics: Iterable[Metric], samples: Mapping[str, list[Series]]) -> Figures:
    figures = {}
    for metric in metrics:
        name = next((name for name in metric.names if name in samples), None)
        if name is not None:
            values = [value for value in _of_first_ranks(samples[name]) if math.isfinite(value)]
            if values:
                figures[metric.figure] = sum(values) / (len(values) if metric.is_mean else 1)
    return figures


def _of_first_ranks(series: Iterable[Series]) -> list[float]:
    """Values without those of further ranks of one engine, which all tell the same."""
    ranked = [
        (labels.get("dp_rank", ""), (labels.get("pp_rank", ""), labels.get("tp_rank", "")), value)
        for labels, value in series
    ]
    first: dict[str, tuple[str, str]] = {}
    for engine, rank, _ in ranked:
        first[engine] = min(rank, first.get(engine, rank), key=_by_number)
    return [value for engine, rank, value in ranked if rank == first[engine]]


def _by_number(rank: tuple[str, str]) -> tuple[int, ...]:
    return tuple(int(word) if word.isdigit() else 0 for word in rank)


def from_server_info(text: str) -> tuple[str, Figures]:
    """(dialect, figures) of /server_info, summed over the engines."""
    try:
        info = json.loads(text)
    except ValueError:
        return "", {}
    listed = info.get("internal_states") if isinstance(info, dict) else None
    states = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    figures: Figures = {}
    for key, figure in INTERNAL_STATE.items():
        values = [s[key] for s in states if isinstance(s.get(key), int | float)]
        if values:
            figures[figure] = float(sum(values))
    return ("sglang", figures) if figures else ("", {})


ROUTES: tuple[tuple[str, Callable[[str], tuple[str, Figures]]], ...] = (
    ("/metrics", from_metrics),
    ("/server_info", from_server_info),
)


class ServerFigures:
    """Asks one server; after `find` by the route that told something."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        self._connection = kind(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
        self._prefix = parts.path
        self._headers = dict(headers)
        self._read: Callable[[str], tuple[str, Figures]] = from_metrics
        self.route = ""
        self.dialect = ""
        self.why_none = ""

    def find(self) -> None:
        """See which route tells figures that are known here; `why_none` when there is none."""
        told = []
        for route, read in ROUTES:
            try:
                status, text = self._get(route)
            except (OSError, http.client.HTTPException) as error:
                told.append(f"{route} does not answer ({error or type(error).__name__})")
                continue
            dialect = read(text)[0] if status == 200 else ""
            if dialect:
                self.route, self._read, self.dialect = route, read, dialect
                return
            told.append(
                f"{route} answers HTTP {status}"
                if status != 200
                else f"{route} tells nothing known"
            )
        self.why_none = f"{' and '.join(told)}; SGLang wants --enable-metrics, llama.cpp --metrics"

    def read(self) -> Figures | None:
        """The figures right now; None when the server did not tell them."""
        try:
            status, text = self._get(self.route)
        except (OSError, http.client.HTTPException):
            return None
        return self._read(text)[1] or None if status == 200 else None

    def _get(self, route: str) -> tuple[int, str]:
        try:
            return self._asked(route)
        except (http.client.RemoteDisconnected, ConnectionError):
            # The server had closed a connection that was idle.
            return self._asked(route)

    def _asked(self, route: str) -> tuple[int, str]:
        try:
            self._connection.request("GET", self._prefix + route, headers=self._headers)
            answer = self._connection.getresponse()
            return answer.status, answer.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException):
            # What is half read would be taken for the next answer.
            self._connection.close()
            raise
