"""The figures' names: ours, and those of SGLang and vLLM where these mean the same.

So dashboards and alarms that were made for them show something here. What has another meaning there
has no name of theirs: SGLang's `cache_hit_rate` is of the last batch, vLLM's
`inter_token_latency_seconds` is of each token apart, and what both call a request is a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from tetrad.core.messages import EngineStats
from tetrad.core.step import PAGE_TOKENS

Reading = Callable[[EngineStats], float]


@dataclass(frozen=True, slots=True)
class Figure:
    """One reading of the engine, under each of its names."""

    text: str
    read: Reading
    ours: str
    sglang: str | None = None
    vllm: str | None = None


def _held(stats: EngineStats) -> float:
    return stats.used_pages / stats.total_pages if stats.total_pages else 0.0


GAUGES = (
    Figure(
        "Sequences in the engine's steps.",
        lambda stats: stats.running_requests,
        *("running_requests", "num_running_reqs", "num_requests_running"),
    ),
    Figure(
        "Requests the engine has not begun.",
        lambda stats: stats.waiting_requests,
        *("waiting_requests", "num_queue_reqs", "num_requests_waiting"),
    ),
    Figure(
        "Share of cache pages held by live requests.",
        _held,
        *("cache_usage_ratio", "token_usage", "kv_cache_usage_perc"),
    ),
    Figure(
        "Tokens that held pages have room for.",
        lambda stats: stats.used_pages * PAGE_TOKENS,
        *("cache_used_tokens", "num_used_tokens"),
    ),
    Figure(
        "Tokens that the cache has room for.",
        lambda stats: stats.total_pages * PAGE_TOKENS,
        *("cache_tokens", "max_total_num_tokens"),
    ),
    Figure(
        "Pages kept only for later prefixes.",
        lambda stats: stats.cached_pages,
        "cache_kept_pages",
    ),
    Figure("Pages of the cache.", lambda stats: stats.total_pages, "cache_total_pages"),
    Figure(
        "Of the tokens a request may still get, those that admission expects.",
        lambda stats: stats.new_token_ratio,
        *("new_token_ratio", "new_token_ratio"),
    ),
    Figure(
        "Tokens generated a second, over the last second.",
        lambda stats: stats.gen_throughput,
        *("generation_tokens_per_second", "gen_throughput"),
    ),
)
COUNTERS = (
    Figure(
        "Prompt tokens computed or cached.",
        lambda stats: stats.prompt_tokens_total,
        *("prompt_tokens", "prompt_tokens", "prompt_tokens"),
    ),
    Figure(
        "Prompt tokens from the prefix cache.",
        lambda stats: stats.cached_tokens_total,
        *("cached_tokens", "cached_tokens", "prefix_cache_hits"),
    ),
    Figure(
        "Prompt tokens that were looked for in the prefix cache.",
        lambda stats: stats.prompt_tokens_total,
        *("prefix_lookup_tokens", None, "prefix_cache_queries"),
    ),
    Figure(
        "Tokens generated.",
        lambda stats: stats.generated_tokens_total,
        *("generated_tokens", "generation_tokens", "generation_tokens"),
    ),
    Figure(
        "Requests set back for want of memory or for one of a higher priority.",
        lambda stats: stats.preemptions_total,
        *("preemptions", "num_retracted_requests", "num_preemptions"),
    ),
    Figure(
        "Requests failed by NaN or infinity.",
        lambda stats: stats.nonfinite_total,
        "nonfinite_logits",
    ),
    Figure("Forward passes.", lambda stats: stats.steps_total, "engine_steps"),
)
HISTOGRAMS: Mapping[str, tuple[str | None, str | None]] = {
    "time_to_first_token_seconds": ("time_to_first_token_seconds", "time_to_first_token_seconds"),
    "time_per_output_token_seconds": (None, "request_time_per_output_token_seconds"),
    "request_duration_seconds": (None, None),
    "sequence_duration_seconds": ("e2e_request_latency_seconds", "e2e_request_latency_seconds"),
    "queue_seconds": ("queue_time_seconds", "request_queue_time_seconds"),
    "prefill_seconds": (None, "request_prefill_time_seconds"),
    "decode_seconds": (None, "request_decode_time_seconds"),
    "request_prompt_tokens": ("prompt_tokens_histogram", "request_prompt_tokens"),
    "request_generated_tokens": ("generation_tokens_histogram", "request_generation_tokens"),
}
"""Our name → SGLang's and vLLM's."""


@dataclass(frozen=True, slots=True)
class Labels:
    """What the names of others are labelled with."""

    model: str

    def all_of(
        self, ours: str, sglang: str | None, vllm: str | None
    ) -> Iterator[tuple[str, dict[str, str]]]:
        """(whole name, labels) of a figure's names."""
        yield f"tetrad_{ours}", {}
        if sglang is not None:
            yield f"sglang:{sglang}", {"model_name": self.model}
        if vllm is not None:
            yield f"vllm:{vllm}", {"model_name": self.model, "engine": "0"}


def families(stats: EngineStats, labels: Labels) -> Iterator[Metric]:
    """Every reading of the engine, under every name."""
    kinds = ((GAUGES, GaugeMetricFamily), (COUNTERS, CounterMetricFamily))
    for figures, kind in kinds:
        for figure in figures:
            value = figure.read(stats)
            for name, its in labels.all_of(figure.ours, figure.sglang, figure.vllm):
                family = kind(name, figure.text, labels=tuple(its))
                family.add_metric(tuple(its.values()), value)
                yield family
