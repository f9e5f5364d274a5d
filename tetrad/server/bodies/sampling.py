"""From a request's sampling fields to the engine's SamplingParams."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tetrad.core.errors import CheckpointError, RequestError
from tetrad.core.gguf import GgufFile, is_gguf
from tetrad.core.jsonfile import read_json_object
from tetrad.core.request import Grammar, SamplingParams
from tetrad.data import packaged_model
from tetrad.server.bodies.fields import SamplingFields
from tetrad.server.bodies.read import checked

GREEDY_BELOW = 1e-5
"""A temperature below this is 0: dividing logits by it would overflow."""


GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
"""Field → where a GGUF file tells its default, as convert_hf_to_gguf.py writes it."""


@dataclass(frozen=True)
class SamplingDefaults:
    """Values of fields that a request leaves out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    origin: str = "OpenAI's"
    """Whose values they are."""

    @classmethod
    def of(cls, source: Literal["model", "openai"], folder: Path) -> SamplingDefaults:
        """OpenAI's, or those of the folder's generation_config.json or of the GGUF file where there
        are any. Raises CheckpointError for values that cannot be."""
        if source == "openai":
            return cls()
        if is_gguf(folder):
            return _of_gguf(GgufFile.read(folder))
        path = folder / "generation_config.json"
        if not path.is_file():
            return cls()
        values = read_json_object(path)
        chosen = {name: v for name in GGUF_KEYS if (v := values.get(name)) is not None}
        for name, value in chosen.items():
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise CheckpointError(f"{path}: {name} must be a number, found {value!r}.")
        if values.get("do_sample") is False:
            chosen["temperature"] = 0.0
        return cls(**chosen, origin=path.name)

    @property
    def told(self) -> str:
        """What holds where a request says nothing, "" where that is what OpenAI's API promises."""
        usual = SamplingDefaults()
        found = {name: getattr(self, name) for name in GGUF_KEYS}
        other = [f"{n} {v:g}" for n, v in found.items() if v != getattr(usual, n)]
        return f"{', '.join(other)} ({self.origin}) where a request says nothing" if other else ""


LLAMA_CPP = SamplingDefaults(
    temperature=0.8, top_p=0.95, top_k=40, min_p=0.05, origin="llama.cpp's, as the file has none"
)
CARDS = {"smollm2": SamplingDefaults(temperature=0.2, top_p=0.9, origin="its model card's")}
"""Of packaged models, whose files tell nothing: small ones ramble at OpenAI's temperature."""


def _of_gguf(file: GgufFile) -> SamplingDefaults:
    """The file's own values, over its model card's or llama.cpp's."""
    files = {packaged_model(name): card for name, card in CARDS.items()}
    chosen = {
        name: v for name, key in GGUF_KEYS.items() if (v := file.metadata.get(key)) is not None
    }
    rest = next((c for f, c in files.items() if f and f.resolve() == file.path), LLAMA_CPP)
    try:
        checked(SamplingFields, chosen)
    except RequestError as error:
        raise CheckpointError(f"{file.path}, general.sampling: {error}") from None
    # They are stored in 32 bits: 0.95 would be shown, and compared, as 0.949999988.
    exact: dict[str, Any] = {
        name: v if name == "top_k" else float(f"{v:.7g}") for name, v in chosen.items()
    }
    origin = "the file's" if chosen else rest.origin
    return replace(rest, **exact, origin=origin)


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
        max_new_tokens=max(1, limits.max_new_tokens),
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
