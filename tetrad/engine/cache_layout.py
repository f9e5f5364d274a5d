"""How many pages the KV cache gets, how many sequences may run, and which limit decided."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tetrad.core.architectures import Arch
from tetrad.core.config import ServeConfig
from tetrad.core.errors import ConfigError
from tetrad.core.limits import Limits
from tetrad.core.step import PAGE_TOKENS
from tetrad.engine.blocks import pages_for

DEFAULT_MAX_RUNNING = 256
DEFAULT_FRACTION = {"cpu": 0.3, "cuda": 0.85}
MAX_USEFUL_FRACTION = 0.95
"""Beyond this nothing is left for activations."""

LimitName = Literal["mem_fraction_static", "max_total_tokens", "max_running_requests"]


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What the device holds after the weights are loaded, before the cache."""

    device_kind: str
    """ "cpu" or "cuda"."""
    total_bytes: int
    used_bytes: int
    """Counts against `mem_fraction_static`: on a GPU all that is taken, else the weights."""
    free_bytes: int
    page_bytes: int
    """One page in all pools together."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Resolved sizes."""

    limits: Limits
    fraction: float
    """Share of the device's memory that weights and cache may take."""
    limited_by: LimitName
    """What the number of pages was cut to: memory, the cap, or all that requests can need."""
    sentence: str
    """The same for people."""


def plan_cache(config: ServeConfig, arch: Arch, use: MemoryUse) -> CacheLayout:
    """Resolve the limits. Raises ConfigError that says which flag to change, and to what."""
    context = resolve_context(config, arch)
    running = _resolve_running(config)
    fraction = config.mem_fraction_static or DEFAULT_FRACTION[use.device_kind]
    candidates: dict[LimitName, int] = {
        "max_running_requests": running * pages_for(context),
        "mem_fraction_static": _pages_in_memory(fraction, use),
    }
    if config.max_total_tokens is not None:
        candidates["max_total_tokens"] = config.max_total_tokens // PAGE_TOKENS
    limited_by, num_pages = min(candidates.items(), key=lambda item: item[1])
    if num_pages < 1:
        raise ConfigError(_too_little(fraction, use, context))
    limits = Limits(
        num_pages=num_pages,
        max_running_requests=min(running, num_pages),
        step_tokens=config.chunked_prefill_size,
        context_tokens=context,
        vocab=arch.vocab,
        eos_ids=arch.eos_ids,
    )
    sentence = _sentence(limited_by, limits, fraction, use)
    return CacheLayout(limits, fraction, limited_by, sentence)


def resolve_context(config: ServeConfig, arch: Arch) -> int:
    """Longest prompt plus output. Raises ConfigError beyond what the model was made for."""
    context = config.context_length or arch.max_position
    if context > arch.max_position:
        raise ConfigError(
            f"--context-length {context}: the model has max_position_embeddings "
            f"{arch.max_position} and knows no positions beyond; at most that works."
        )
    return context


def _resolve_running(config: ServeConfig) -> int:
    asked, budget = config.max_running_requests, config.chunked_prefill_size
    if asked is not None and asked > budget:
        raise ConfigError(
            f"--max-running-requests {asked} is more than --chunked-prefill-size {budget}, the "
            f"token budget of a step, of which each running request takes at least one; raise the "
            f"latter to {asked} or lower the former to {budget}."
        )
    return asked or min(DEFAULT_MAX_RUNNING, budget)


def _pages_in_memory(fraction: float, use: MemoryUse) -> int:
    room_bytes = min(int(fraction * use.total_bytes) - use.used_bytes, use.free_bytes)
    return room_bytes // use.page_bytes


def _too_little(fraction: float, use: MemoryUse, context: int) -> str:
    """Names the fraction that holds one whole context, or failing that one page."""
    found = (
        f"--mem-fraction-static {fraction:g} of {_gb(use.total_bytes)} leaves no room for a cache "
        f"beside {_gb(use.used_bytes)} in use (free: {_gb(use.free_bytes)})"
    )
    for num_pages in (pages_for(context), 1):
        needed_bytes = use.used_bytes + num_pages * use.page_bytes
        needed = math.ceil(100 * needed_bytes / use.total_bytes) / 100
        if needed <= MAX_USEFUL_FRACTION and num_pages * use.page_bytes <= use.free_bytes:
            return f"{found}; {needed:g} holds {num_pages * PAGE_TOKENS} tokens."
    return f"{found}; the model does not fit on this device with any value."


def _sentence(limited_by: LimitName, limits: Limits, fraction: float, use: MemoryUse) -> str:
    size = f"{limits.cache_tokens} tokens ({_gb(limits.num_pages * use.page_bytes)})"
    if limited_by == "max_total_tokens":
        return f"{size}, capped by --max-total-tokens"
    if limited_by == "mem_fraction_static":
        return f"{size}, all that --mem-fraction-static {fraction:g} leaves beside the weights"
    return (
        f"{size}, all that {limits.max_running_requests} running requests with a context of "
        f"{limits.context_tokens} tokens can fill"
    )


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB"
