"""Flags of the workload that change nothing, as other tools' scripts have them: told at start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tetrad.bench.options.serve import BenchServeConfig
from tetrad.core.option import in_vain

RANDOM = ("random", "random-ids")
FILES = ("sharegpt", "custom", "openai")
PREFIXES, TRACE = ("generated-shared-prefix",), ("mooncake",)
READ_BY: Mapping[str, tuple[str, ...]] = {
    "random_input_len": RANDOM,
    "random_output_len": (*RANDOM, "custom", "openai"),
    "random_range_ratio": RANDOM,
    "length_distribution": RANDOM,
    "length_cv": RANDOM,
    "sharegpt_output_len": FILES,
    "sharegpt_context_len": ("sharegpt", "custom"),
    "prompt_suffix": FILES,
    "apply_chat_template": FILES,
    "cache_bust": FILES,
    "gsp_num_groups": PREFIXES,
    "gsp_prompts_per_group": PREFIXES,
    "gsp_system_prompt_len": PREFIXES,
    "gsp_question_len": PREFIXES,
    "gsp_output_len": PREFIXES,
    "gsp_range_ratio": PREFIXES,
    "gsp_num_turns": PREFIXES,
    "gsp_ordered": PREFIXES,
    "gsp_group_distribution": PREFIXES,
    "gsp_zipf_alpha": PREFIXES,
    "mooncake_slowdown_factor": TRACE,
    "mooncake_num_rounds": TRACE,
}
"""Field → the datasets that look at it."""
OF_LOGPROBS = ("top_logprobs_num", "token_ids_logprob", "logprob_start_len")


def without_effect(config: BenchServeConfig) -> Iterator[str]:
    """A sentence for the flags that were given in vain for one reason."""
    name = config.dataset_name
    unread = [field for field, datasets in READ_BY.items() if name not in datasets]
    yield from in_vain(config, unread, f"with --dataset-name {name}")
    if config.dataset_path is None:
        yield from in_vain(config, ("dataset_offset",), "without --dataset-path")
    if name in RANDOM and config.length_distribution == "uniform":
        yield from in_vain(config, ("length_cv",), "on uniform lengths")
    if not config.return_logprob:
        yield from in_vain(config, OF_LOGPROBS, "without --return-logprob")
    if config.use_trace_timestamps:
        yield from in_vain(config, ("burstiness",), "with a trace's time stamps")
    elif not config.has_rate:
        yield from in_vain(config, ("burstiness",), "on requests that are sent all at once")
