"""The engine's door: a request that cannot be served is refused here, in one sentence."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from tetrad.core.errors import RequestError
from tetrad.core.limits import Limits
from tetrad.core.request import MAX_GRAMMAR_BYTES, Grammar, Request, SamplingParams

TOO_LONG = "context_length_exceeded"
TOO_MUCH = "exceeds the available context size"
"""By one of these, or by "prompt is too long: N tokens > M maximum", client libraries know it."""
MAX_LOGPROBS = 100
MAX_LOGIT_BIAS = 100.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
"""Logits are divided and multiplied by it: far outside they would overflow float32."""


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
    if not request.prompt:
        raise RequestError("The prompt is empty; it needs at least one token.", param="prompt")
    # read without a sign, a negative one is too large as well; `max` has twice the overhead
    ids = np.frombuffer(request.prompt, np.uint32)
    if ids.item(ids.argmax()) >= limits.vocab:
        raise _unknown_id("prompt", request.prompt_ids, limits.vocab)
    sampling = request.sampling
    for param, named in (
        ("stop_token_ids", sampling.stop_token_ids),
        ("logit_bias", sampling.logit_bias),
    ):
        if named and (min(named) < 0 or max(named) >= limits.vocab):
            raise _unknown_id(param, named, limits.vocab)


def _unknown_id(param: str, ids: Iterable[int], vocab: int) -> RequestError:
    wrong = next(i for i in ids if not 0 <= i < vocab)
    return RequestError(
        f"{param} holds token id {wrong}; the model's ids go from 0 to {vocab - 1}.", param=param
    )


RULES = (
    ("max_new_tokens", "at least 1"),
    ("min_new_tokens", "at least 0"),
    ("temperature", "0 or more"),
    ("top_p", "above 0 and at most 1"),
    ("top_k", "at least 1, or 0 for all"),
    ("min_p", "from 0 to 1"),
    ("repetition_penalty", f"from {MIN_REPETITION_PENALTY:g} to {MAX_REPETITION_PENALTY:g}"),
    ("presence_penalty", "from -2 to 2"),
    ("frequency_penalty", "from -2 to 2"),
    ("logit_bias", f"within {MAX_LOGIT_BIAS:g} of 0"),
    ("num_logprobs", f"0 to {MAX_LOGPROBS}"),
    ("stop_token_ids", "fewer than the vocabulary"),
)
"""Fields of a request's sampling in the order in which they are checked, and what each must be."""


def _check_sampling(sampling: SamplingParams, limits: Limits) -> None:
    bias = max(map(abs, sampling.logit_bias.values())) if sampling.logit_bias else 0.0
    num_end_ids = len({*limits.eos_ids, *sampling.stop_token_ids})
    are_valid = (
        sampling.max_new_tokens >= 1,
        sampling.min_new_tokens >= 0,
        0.0 <= sampling.temperature < math.inf,
        0.0 < sampling.top_p <= 1.0,
        sampling.top_k >= 0,
        0.0 <= sampling.min_p <= 1.0,
        MIN_REPETITION_PENALTY <= sampling.repetition_penalty <= MAX_REPETITION_PENALTY,
        -2.0 <= sampling.presence_penalty <= 2.0,
        -2.0 <= sampling.frequency_penalty <= 2.0,
        bias <= MAX_LOGIT_BIAS,
        sampling.num_logprobs is None or 0 <= sampling.num_logprobs <= MAX_LOGPROBS,
        num_end_ids < limits.vocab,
    )
    if False in are_valid:
        param, rule = RULES[are_valid.index(False)]
        derived = {"logit_bias": bias, "stop_token_ids": num_end_ids}
        value = derived.get(param, getattr(sampling, param))
        raise RequestError(f"{param} must be {rule}; it is {value}.", param=param)


def _check_length(request: Request, limits: Limits) -> None:
    num_prompt, num_new = request.num_prompt, request.sampling.max_new_tokens
    if num_prompt + num_new <= min(limits.context_tokens, limits.cache_tokens):
        return
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
                f"The prompt is too long: {num_prompt} tokens > {num_tokens - 1} maximum; with one "
                f"of an answer it {TOO_MUCH}: {holder} holds {num_tokens}{cure}.",
                param="prompt",
                code=TOO_LONG,
            )
        if num_prompt + num_new > num_tokens:
            raise RequestError(
                f"The prompt has {num_prompt} tokens and max_tokens asks for {num_new} more, "
                f"which together {TOO_MUCH}: {num_prompt + num_new}, but {holder} holds "
                f"{num_tokens}{cure}; max_tokens can be at most {num_tokens - num_prompt}.",
                param="max_tokens",
                code=TOO_LONG,
            )
