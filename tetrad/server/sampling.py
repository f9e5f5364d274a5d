"""From a request's sampling fields to the engine's SamplingParams."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from tetrad.core.errors import CheckpointError, RequestError
from tetrad.core.jsonfile import read_json_object
from tetrad.core.request import Grammar, SamplingParams
from tetrad.server.protocol import SamplingFields

GREEDY_BELOW = 1e-5
"""A temperature below this is 0: dividing logits by it would overflow."""


@dataclass(frozen=True)
class SamplingDefaults:
    """Values of fields that a request leaves out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of(cls, source: Literal["model", "openai"], folder: Path) -> SamplingDefaults:
        """OpenAI's, or those of the folder's generation_config.json where it has any."""
        path = folder / "generation_config.json"
        if source == "openai" or not path.is_file():
            return cls()
        values = read_json_object(path)
        chosen = {f.name: v for f in fields(cls) if (v := values.get(f.name)) is not None}
        for name, value in chosen.items():
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise CheckpointError(f"{path}: {name} must be a number, found {value!r}.")
        if values.get("do_sample") is False:
            chosen["temperature"] = 0.0
        return cls(**chosen)


@dataclass(frozen=True)
class AnswerLimits:
    """What a route says about the answer, under whichever names it has for it."""

    max_new_tokens: int
    min_new_tokens: int
    num_logprobs: int | None
    seed: int | None


def sampling_params(
    body: SamplingFields,
    defaults: SamplingDefaults,
    limits: AnswerLimits,
    grammar: Grammar | None = None,
) -> SamplingParams:
    """Ranges were checked with the body; what depends on the model is the engine's to refuse."""
    if limits.min_new_tokens > limits.max_new_tokens:
        raise RequestError(
            f"min_tokens is {limits.min_new_tokens}, but the answer may have "
            f"{limits.max_new_tokens} tokens at most.",
            param="min_tokens",
        )
    temperature = _or(body.temperature, defaults.temperature)
    return SamplingParams(
        max_new_tokens=limits.max_new_tokens,
        min_new_tokens=limits.min_new_tokens,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=_or(body.top_p, defaults.top_p),
        top_k=max(0, _or(body.top_k, defaults.top_k)),
        min_p=_or(body.min_p, defaults.min_p),
        repetition_penalty=_or(body.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        logit_bias={int(key): value for key, value in (body.logit_bias or {}).items()},
        seed=limits.seed,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        num_logprobs=limits.num_logprobs,
        grammar=grammar,
    )


def stop_strings(body: SamplingFields) -> tuple[str, ...]:
    """`stop` as a tuple."""
    if body.stop is None:
        return ()
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
