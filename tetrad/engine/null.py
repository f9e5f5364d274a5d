"""An engine without a model: scheduling, pages and outputs are real, but a step only takes its
time and its tokens are scripted.

This measures, on any machine, what serving costs apart from the model: scheduler, messages between
processes, text, HTTP. The token at a position depends only on the request's seed and the position,
so every stream can be checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tetrad import __version__
from tetrad.core.config import ServeConfig
from tetrad.core.messages import EngineProgress
from tetrad.core.plan import Decodes, Ints, StepPlan, StepResult
from tetrad.core.presets import served_shapes
from tetrad.core.request import TokenLogprob
from tetrad.core.step import PAGE_TOKENS
from tetrad.engine.cache_layout import CacheLayout, MemoryUse, plan_cache
from tetrad.engine.engine import Engine, scheduler_of
from tetrad.engine.grammars import Masks

STRIDE = 7919
"""Between the tokens of two places that follow one another: a prime, so that all come up."""
ROOM_BYTES = 1 << 50
"""Pages take no memory: as many as requests can fill."""


def scripted_token(seed: int, place: int, vocab: int, avoided: frozenset[int]) -> int:
    """The token that a request of `seed` gets as its `place`-th, none of `avoided`."""
    token = (seed + place * STRIDE) % vocab
    while token in avoided:
        token = (token + 1) % vocab
    return token


class NullStep:
    """A step that is done at a set time."""

    def __init__(self, result: StepResult, due_at: float) -> None:
        self._result = result
        self.due_at = due_at

    def wait(self) -> StepResult:
        """Sleeps until then."""
        left_s = self.due_at - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)
        return self._result


class NullRunner:
    """Steps follow one another, `step_s` each."""

    def __init__(self, vocab: int, eos_ids: tuple[int, ...], step_s: float) -> None:
        self._vocab = vocab
        self._eos_ids = frozenset(eos_ids)
        self._is_end = np.zeros(vocab, np.bool_)
        self._is_end[[end for end in eos_ids if end < vocab]] = True
        self._step_s = step_s
        self._free_at = 0.0

    def launch(self, plan: StepPlan, masks: Callable[[], Masks | None] | None = None) -> NullStep:
        """Start a step. No grammar changes what is scripted: its engine has none."""
        assert masks is None
        self._free_at = max(self._free_at, time.monotonic()) + self._step_s
        decodes, works = plan.decodes, [work.sample for work in plan.sequences if work.sample]
        seeds, places = [work.seed for work in works], [work.num_generated for work in works]
        own = [self._token(*pair) for pair in zip(seeds, places, strict=True)]
        tokens = np.concatenate([self._tokens(decodes), np.array(own, np.int64)])
        logprobs = {
            row: self._logprob(token, work.params.num_logprobs)
            for row, (work, token) in enumerate(zip(works, own, strict=True), len(decodes))
            if work.params.num_logprobs is not None
        }
        return NullStep(StepResult(tokens, logprobs), self._free_at)

    def _token(self, seed: int, place: int) -> int:
        return scripted_token(seed, place, self._vocab, self._eos_ids)

    def _logprob(self, token: int, num_top: int) -> TokenLogprob:
        """Scripted, too, and as long to write as a model's: the token, and those after it."""
        top = tuple(((token + rank) % self._vocab, -(rank + 1) / 7) for rank in range(num_top))
        return TokenLogprob(token, -1 / 7, top)

    def _tokens(self, decodes: Decodes) -> Ints:
        """`scripted_token` of each."""
        starts = (decodes.seeds % np.uint64(self._vocab)).astype(np.int64)
        tokens = (starts + decodes.num_generated * STRIDE) % self._vocab
        while (is_end := self._is_end[tokens]).any():
            tokens = np.where(is_end, (tokens + 1) % self._vocab, tokens)
        return tokens


def load_null(config: ServeConfig, _on_progress: Callable[[EngineProgress], None]) -> Engine:
    """The engine of `--load-format null`. Raises ConfigError as any other."""
    assert config.model is not None
    arch = served_shapes(config.model, config.load_format)
    use = MemoryUse(
        device_kind="cpu", total_bytes=ROOM_BYTES, used_bytes=0, free_bytes=ROOM_BYTES, page_bytes=1
    )
    layout = plan_cache(config, arch, use)
    return Engine(
        scheduler_of(config, layout.limits),
        NullRunner(arch.vocab, arch.eos_ids, config.null_step_ms / 1e3),
        _info(config, layout),
        overlap=not config.disable_overlap_schedule,
        continuous_steps=config.num_continuous_decode_steps,
        stream_interval=config.stream_interval,
    )


def _info(config: ServeConfig, layout: CacheLayout) -> dict[str, Any]:
    """What the server shows of any engine."""
    limits = layout.limits
    return {
        "version": __version__,
        "model_path": str(config.model),
        "context_length": min(limits.context_tokens, limits.cache_tokens),
        "max_total_tokens": limits.cache_tokens,
        "max_running_requests": limits.max_running_requests,
        "chunked_prefill_size": limits.step_tokens,
        "page_size": PAGE_TOKENS,
        "cache_limited_by": layout.limited_by,
        "cache_sentence": f"{limits.cache_tokens} tokens that nobody stores",
        "memory_statement": [f"no model: a step takes {config.null_step_ms:g} ms, whatever is in"],
        "mem_fraction_static": layout.fraction,
        "memory": {"weight_bytes": 0, "cache_bytes": 0, "free_bytes": 0},
        "weights": {},
        "load_s": 0.0,
        "read_gb_per_s": None,
        "backends": [],
        "device": {"name": "no device", "kind": "null", "memory_bytes": 0},
        "dtype": "none",
        "kv_cache_dtype": "none",
        "graph_sizes": None,
        "graph_bytes": 0,
        "load_format": config.load_format,
        "random_seed": config.random_seed,
        "disable_radix_cache": config.disable_radix_cache,
    }
