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
        "Sequences that are running.",
        lambda stats: stats.running_requests,
        *("running_requests", "num_running_reqs", "num_requests_running"),
    ),
    Figure(
        "Sequences that are queued in the engine, preempted ones among them.",
        lambda stats: stats.waiting_requests,
        *("waiting_requests", "num_queue_reqs", "num_requests_waiting"),
    ),
    Figure(
        "Fraction of the KV cache's pages that sequences hold, 0 to 1.",
        _held,
        *("cache_usage_ratio", "token_usage", "kv_cache_usage_perc"),
    ),
    Figure(
        "Capacity, in tokens, of the KV cache pages that sequences hold.",
        lambda stats: stats.used_pages * PAGE_TOKENS,
        *("cache_used_tokens", "num_used_tokens"),
    ),
    Figure(
        "Capacity of the KV cache in tokens.",
        lambda stats: stats.total_pages * PAGE_TOKENS,
        *("cache_tokens", "max_total_num_tokens"),
    ),
    Figure(
        "Pages of the KV cache that are kept for the prefix cache alone.",
        lambda stats: stats.cached_pages,
        "cache_kept_pages",
    ),
    Figure(
        "Number of pages of the KV cache.", lambda stats: stats.total_pages, "cache_total_pages"
    ),
    Figure(
        "Fraction of their remaining max_tokens that running sequences are expected to use.",
        lambda stats: stats.new_token_ratio,
        *("new_token_ratio", "new_token_ratio"),
    ),
    Figure(
        "Tokens generated per second, over the last second.",
        lambda stats: stats.gen_throughput,
        *("generation_tokens_per_second", "gen_throughput"),
    ),
)
COUNTERS = (
    Figure(
        "Prompt tokens that were computed or found in the prefix cache.",
        lambda stats: stats.prompt_tokens_total,
        *("prompt_tokens", "prompt_tokens", "prompt_tokens"),
    ),
    Figure(
        "Prompt tokens that were found in the prefix cache.",
        lambda stats: stats.cached_tokens_total,
        *("cached_tokens", "cached_tokens", "prefix_cache_hits"),
    ),
    Figure(
        "Prompt tokens that were looked up in the prefix cache.",
        lambda stats: stats.prompt_tokens_total,
        *("prefix_lookup_tokens", None, "prefix_cache_queries"),
    ),
    Figure(
        "Tokens that were generated.",
        lambda stats: stats.generated_tokens_total,
        *("generated_tokens", "generation_tokens", "generation_tokens"),
    ),
    Figure(
        "Times a sequence was preempted (retracted), for want of memory or by a higher priority.",
        lambda stats: stats.preemptions_total,
        *("preemptions", "num_retracted_requests", "num_preemptions"),
    ),
    Figure(
        "Sequences that failed because logits were NaN or infinite.",
        lambda stats: stats.nonfinite_total,
        "nonfinite_logits",
    ),
    Figure(
        "Steps (forward passes) of the engine.", lambda stats: stats.steps_total, "engine_steps"
    ),
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
