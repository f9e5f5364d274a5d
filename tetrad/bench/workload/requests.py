"""One request to send, and how random ones are made: lengths first, then content."""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tetrad.bench.options.serve import BenchServeConfig
from tetrad.bench.workload.tokens import Vocabulary
from tetrad.core.errors import ConfigError

DEFAULT_NUM_PROMPTS = 1000
DEFAULT_SEED = 42


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request to send; exactly one of `ids`, `text` and `messages` is set."""

    output_tokens: int
    """Tokens it should get."""
    ids: tuple[int, ...] | None = None
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    num_tokens: int | None = None
    """Length of the prompt where the client knows it."""
    extra: dict[str, Any] | None = None
    """Fields of the body that this request alone has."""
    trace_s: float | None = None
    """When its trace wants it sent, in seconds after the first of them."""
    after: int | None = None
    """Index of the request before it in the same conversation, whose end it waits for."""


@dataclass(frozen=True, slots=True)
class Seeds:
    """Lengths and arrivals repeat from run to run; content repeats only on request."""

    shape: int
    content: int

    @classmethod
    def of(cls, config: BenchServeConfig) -> Seeds:
        if config.seed is not None:
            return cls(config.seed, config.seed)
        return cls(DEFAULT_SEED, secrets.randbits(32))

    def of_run(self, number: int, setting: str = "") -> Seeds:
        """Other content, of the same shape, for each repetition and each setting of a sweep: no
        prompt may be in the server's cache because an earlier run sent it. The warm-up has the
        seed after the content's."""
        if not number and not setting:
            return self
        rng = random.Random(f"{self.content} {number} {setting}")
        return replace(self, content=rng.getrandbits(32))


def random_lengths(config: BenchServeConfig, count: int, seed: int) -> list[tuple[int, int]]:
    """(prompt, output) lengths by the configured distribution."""
    rng = random.Random(f"lengths {seed}")
    if config.length_distribution == "uniform":
        ratio = config.random_range_ratio
        inputs = uniform(rng, config.random_input_len, ratio, count)
        return list(zip(inputs, uniform(rng, config.random_output_len, ratio, count), strict=True))
    draw = {"normal": normal, "lognormal": lognormal}[config.length_distribution]
    inputs = draw(rng, config.random_input_len, config.length_cv, count)
    return list(
        zip(inputs, draw(rng, config.random_output_len, config.length_cv, count), strict=True)
    )


def uniform(rng: random.Random, longest: int, ratio: float, count: int) -> list[int]:
    """Each drawn evenly from [max(int(longest * ratio), 1), longest]."""
    shortest = max(int(longest * ratio), 1)
    return [rng.randint(shortest, longest) for _ in range(count)]


def normal(rng: random.Random, mean: int, cv: float, count: int) -> list[int]:
    """Rounded, with standard deviation `mean * cv`; what falls below 1 is drawn again, which
    raises the mean a little when `cv` is large."""
    return [_drawn_above_half(lambda: rng.gauss(mean, mean * cv)) for _ in range(count)]


def lognormal(rng: random.Random, mean: int, cv: float, count: int) -> list[int]:
    """Rounded, at least 1; mean and standard deviation are those of the lengths, not of their
    logarithms."""
    sigma = math.sqrt(math.log1p(cv**2))
    mu = math.log(mean) - sigma**2 / 2
    return [max(1, round(rng.lognormvariate(mu, sigma))) for _ in range(count)]


def _drawn_above_half(draw: Callable[[], float]) -> int:
    while (value := draw()) < 0.5:
        pass
    return max(1, round(value))


def known(vocabulary: Vocabulary | None) -> Vocabulary:
    """The vocabulary that generated prompts need. Raises ConfigError when there is none."""
    if vocabulary is None:
        raise ConfigError(
            "Random prompts need the model's vocabulary and the server names no folder or GGUF "
            "file with it on this machine; give --tokenizer FOLDER, or a file with --dataset-name "
            "custom."
        )
    return vocabulary


def sends_text(config: BenchServeConfig) -> bool:
    """Whether generated prompts go out as text; else as token ids, which every API but chat takes
    and whose number is exact by construction."""
    is_text = config.dataset_name == "random" and not config.tokenize_prompt
    return is_text or config.backend.endswith("-chat")


def draw(
    config: BenchServeConfig,
    lengths: Sequence[tuple[int, int]],
    seed: int,
    vocabulary: Vocabulary | None,
) -> list[Prompt]:
    """Random prompts of the given (prompt, output) lengths."""
    words = known(vocabulary)
    rng = random.Random(f"content {seed}")
    if sends_text(config):
        return [Prompt(o, text=words.draw_text(rng, n), num_tokens=n) for n, o in lengths]
    return [Prompt(o, ids=tuple(words.draw_ids(rng, n)), num_tokens=n) for n, o in lengths]
