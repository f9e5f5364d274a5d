"""The engine's door: a request that cannot be served is refused here, in one sentence."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tetrad.core.errors import RequestError
from tetrad.core.request import MAX_GRAMMAR_BYTES, Grammar, Request, SamplingParams
from tetrad.core.step import PAGE_TOKENS

MAX_LOGPROBS = 100
MAX_LOGIT_BIAS = 100.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
"""Logits are divided and multiplied by it: far outside they would overflow float32."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine can serve; resolved once at start."""

    num_pages: int
    max_running_requests: int
    step_tokens: int
    """Token budget of one step."""
    context_tokens: int
    """Longest prompt plus output."""
    vocab: int
    eos_ids: tuple[int, ...] = ()

    @property
    def cache_tokens(self) -> int:
        return self.num_pages * PAGE_TOKENS


def check_request(request: Request, limits: Limits) -> None:
    """Raise RequestError unless the engine can serve `request` to its end; but for whether its
    grammar can be followed."""
    _check_grammar(request.sampling.grammar)
    _check_ids(request, limits)
    _check_sampling(request.sampling, limits)
    _check_length(request, limits)


def end_ids(sampling: SamplingParams, limits: Limits) -> frozenset[int]:
    """Tokens that end a request. Where a grammar ends, it allows the model's end tokens alone: they
    cannot be ignored then."""
    is_endless = sampling.ignore_eos and sampling.grammar is None
    return frozenset((*(() if is_endless else limits.eos_ids), *sampling.stop_token_ids))


def _check_grammar(grammar: Grammar | None) -> None:
    if grammar is not None and (num_bytes := len(grammar.text.encode())) > MAX_GRAMMAR_BYTES:
        raise RequestError(
            f"{grammar.field} has {num_bytes} bytes; what constrains an answer has "
            f"{MAX_GRAMMAR_BYTES} at most.",
            param=grammar.field,
        )


def _check_ids(request: Request, limits: Limits) -> None:
    if not request.prompt_ids:
        raise RequestError("The prompt is empty; it needs at least one token.", param="prompt")
    sampling = request.sampling
    for param, ids in (
        ("prompt", request.prompt_ids),
        ("stop_token_ids", sampling.stop_token_ids),
        ("logit_bias", tuple(sampling.logit_bias)),
    ):
        if ids and (min(ids) < 0 or max(ids) >= limits.vocab):
            wrong = next(i for i in ids if not 0 <= i < limits.vocab)
            raise RequestError(
                f"{param} holds token id {wrong}; the model's ids go from 0 to {limits.vocab - 1}.",
                param=param,
            )


def _check_sampling(sampling: SamplingParams, limits: Limits) -> None:
    bias = max(map(abs, sampling.logit_bias.values()), default=0.0)
    num_end_ids = len({*limits.eos_ids, *sampling.stop_token_ids})
    for param, value, is_valid, rule in (
        ("max_new_tokens", sampling.max_new_tokens, sampling.max_new_tokens >= 1, "at least 1"),
        ("min_new_tokens", sampling.min_new_tokens, sampling.min_new_tokens >= 0, "at least 0"),
        ("temperature", sampling.temperature, 0.0 <= sampling.temperature < math.inf, "0 or more"),
        ("top_p", sampling.top_p, 0.0 < sampling.top_p <= 1.0, "above 0 and at most 1"),
        ("top_k", sampling.top_k, sampling.top_k >= 0, "at least 1, or 0 for all"),
        ("min_p", sampling.min_p, 0.0 <= sampling.min_p <= 1.0, "from 0 to 1"),
        (
            "repetition_penalty",
            sampling.repetition_penalty,
            MIN_REPETITION_PENALTY <= sampling.repetition_penalty <= MAX_REPETITION_PENALTY,
            f"from {MIN_REPETITION_PENALTY:g} to {MAX_REPETITION_PENALTY:g}",
        ),
        (
            "presence_penalty",
            sampling.presence_penalty,
            -2.0 <= sampling.presence_penalty <= 2.0,
            "from -2 to 2",
        ),
        (
            "frequency_penalty",
            sampling.frequency_penalty,
            -2.0 <= sampling.frequency_penalty <= 2.0,
            "from -2 to 2",
        ),
        ("logit_bias", bias, bias <= MAX_LOGIT_BIAS, f"within {MAX_LOGIT_BIAS:g} of 0"),
        ("num_logprobs", sampling.num_logprobs, _fits_logprobs(sampling), f"0 to {MAX_LOGPROBS}"),
        ("stop_token_ids", num_end_ids, num_end_ids < limits.vocab, "fewer than the vocabulary"),
    ):
        if not is_valid:
            raise RequestError(f"{param} must be {rule}; it is {value}.", param=param)


def _fits_logprobs(sampling: SamplingParams) -> bool:
    return sampling.num_logprobs is None or 0 <= sampling.num_logprobs <= MAX_LOGPROBS


def _check_length(request: Request, limits: Limits) -> None:
    num_prompt, num_new = len(request.prompt_ids), request.sampling.max_new_tokens
    for num_tokens, holder, cure in (
        (limits.context_tokens, "the context", ""),
        (
            limits.cache_tokens,
            "the whole cache",
            " (--max-total-tokens and --mem-fraction-static size it)",
        ),
    ):
        if num_prompt >= num_tokens:
            raise RequestError(
                f"The prompt has {num_prompt} tokens but {holder} holds {num_tokens}{cure}; a "
                f"prompt of at most {num_tokens - 1} tokens leaves room for an answer.",
                param="prompt",
            )
        if num_prompt + num_new > num_tokens:
            raise RequestError(
                f"The prompt has {num_prompt} tokens and max_tokens asks for {num_new} more, "
                f"{num_prompt + num_new} together, but {holder} holds {num_tokens}{cure}; "
                f"max_tokens can be at most {num_tokens - num_prompt}.",
                param="max_tokens",
            )
