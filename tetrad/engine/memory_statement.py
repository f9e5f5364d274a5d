"""The summary of memory printed at start: what uses it, which limit binds, and what more memory
would add."""

from __future__ import annotations

from tetrad.core.config import ServeConfig
from tetrad.core.step import PAGE_TOKENS
from tetrad.engine.blocks import pages_for
from tetrad.engine.cache_layout import DEFAULT_MAX_RUNNING, CacheLayout, MemoryUse

GB = 10**9


def memory_statement(
    config: ServeConfig,
    layout: CacheLayout,
    use: MemoryUse,
    *,
    weight_bytes: int,
    activation_bytes: int | None,
    graph_bytes: int,
) -> list[str]:
    """Sentences for people: the shares, the limit on running requests, the worth of one more GB.
    `activation_bytes` None: not measured."""
    limits = layout.limits
    cache_bytes = limits.num_pages * use.page_bytes
    others_bytes = max(0, use.total_bytes - use.free_bytes - weight_bytes)
    shares = [
        (weight_bytes, "weights"),
        (cache_bytes, f"KV cache ({limits.cache_tokens} tokens)"),
        (graph_bytes, "recorded steps"),
        (activation_bytes or 0, f"activations of a step of {limits.step_tokens} tokens"),
        (others_bytes, "other programs and the runtime"),
    ]
    reserve_bytes = max(0, use.total_bytes - sum(num_bytes for num_bytes, _ in shares))
    told = [f"{_size(num_bytes)} {name}" for num_bytes, name in shares if num_bytes]
    return [
        f"{_size(use.total_bytes)}: {', '.join(told)}, {_size(reserve_bytes)} left",
        _running(config, layout),
        _one_more_gb(layout, use),
    ]


def _running(config: ServeConfig, layout: CacheLayout) -> str:
    """What decided how many requests run at once, and how many of the longest fit."""
    limits = layout.limits
    running = limits.max_running_requests
    if running == limits.num_pages:
        why = "the cache has no more pages"
    elif config.max_running_requests is not None:
        why = "as --max-running-requests says"
    elif running < DEFAULT_MAX_RUNNING:
        why = "as --chunked-prefill-size bounds a step's tokens"
    else:
        why = "the default; --max-running-requests changes it"
    longest = limits.num_pages // pages_for(limits.context_tokens)
    return (
        f"{running} requests at once, {why}; of {limits.context_tokens} tokens each the cache "
        f"holds {longest}"
    )


def _one_more_gb(layout: CacheLayout, use: MemoryUse) -> str:
    """What the cache would gain."""
    limits = layout.limits
    if layout.limited_by == "max_total_tokens":
        return "one more GB would buy nothing: --max-total-tokens caps the cache"
    if layout.limited_by == "max_running_requests":
        return "one more GB would buy nothing: all running requests fit at full length"
    num_pages = GB // use.page_bytes
    share = GB / use.total_bytes
    return (
        f"one more GB (--mem-fraction-static +{share:.3g}) would hold {num_pages * PAGE_TOKENS} "
        f"more tokens, {num_pages / pages_for(limits.context_tokens):.3g} requests of "
        f"{limits.context_tokens}"
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GB:.3g} GB" if num_bytes >= GB // 100 else f"{num_bytes / 1e6:.3g} MB"
