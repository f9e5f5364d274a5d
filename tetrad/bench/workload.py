"""What is sent: prompts and how many tokens each should get."""

from __future__ import annotations

import json
import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tetrad.bench.options import BenchServeConfig
from tetrad.bench.tokens import Vocabulary
from tetrad.core.errors import ConfigError, nearest

DEFAULT_NUM_PROMPTS = 1000
DEFAULT_SEED = 42
LINE_KEYS = ("prompt", "messages", "input_ids", "output_len")
WARMUP_OUTPUT_TOKENS = 32


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


def build(config: BenchServeConfig, seeds: Seeds, vocabulary: Vocabulary | None) -> list[Prompt]:
    """The prompts of the run, in order."""
    if config.dataset_path is not None:
        return from_file(config.dataset_path, config.num_prompts, config.random_output_len)
    count = config.num_prompts or DEFAULT_NUM_PROMPTS
    return draw(config, count, random_lengths(config, count, seeds.shape), seeds, vocabulary)


def warmup(
    config: BenchServeConfig, prompts: list[Prompt], seeds: Seeds, vocabulary: Vocabulary | None
) -> list[Prompt]:
    """Prompts of the same lengths whose beginning differs, so that they warm no cache entry."""
    count = config.warmup_requests
    shapes = [prompts[i % len(prompts)] for i in range(count)]
    if config.dataset_path is not None:
        drawn = [_other_beginning(shape, place) for place, shape in enumerate(shapes)]
    else:
        lengths = [(shape.num_tokens or 1, shape.output_tokens) for shape in shapes]
        other = replace(seeds, content=seeds.content + 1)
        drawn = draw(config, count, lengths, other, vocabulary)
    return [replace(p, output_tokens=min(p.output_tokens, WARMUP_OUTPUT_TOKENS)) for p in drawn]


def random_lengths(config: BenchServeConfig, count: int, seed: int) -> list[tuple[int, int]]:
    """(prompt, output) lengths, each drawn evenly from [max(int(longest * ratio), 1), longest]."""
    rng = random.Random(f"lengths {seed}")
    ratio = config.random_range_ratio

    def lengths(longest: int) -> list[int]:
        shortest = max(int(longest * ratio), 1)
        return [rng.randint(shortest, longest) for _ in range(count)]

    inputs = lengths(config.random_input_len)
    return list(zip(inputs, lengths(config.random_output_len), strict=True))


def draw(
    config: BenchServeConfig,
    count: int,
    lengths: list[tuple[int, int]],
    seeds: Seeds,
    vocabulary: Vocabulary | None,
) -> list[Prompt]:
    """Random prompts of the given lengths: token ids where the API takes them, else text."""
    if vocabulary is None:
        raise ConfigError(
            "Random prompts need the model's vocabulary and the server names no folder that is on "
            "this machine; give --tokenizer FOLDER, or a file with --dataset-name custom."
        )
    rng = random.Random(f"content {seeds.content}")
    as_text = config.dataset_name == "random" or config.backend.endswith("-chat")
    make: Callable[[random.Random, Vocabulary, int, int], Prompt] = _text if as_text else _ids
    return [make(rng, vocabulary, *lengths[i]) for i in range(count)]


def _ids(rng: random.Random, vocabulary: Vocabulary, num_tokens: int, output: int) -> Prompt:
    ids = tuple(vocabulary.draw_ids(rng, num_tokens))
    return Prompt(output, ids=ids, num_tokens=num_tokens)


def _text(rng: random.Random, vocabulary: Vocabulary, num_tokens: int, output: int) -> Prompt:
    return Prompt(output, text=vocabulary.draw_text(rng, num_tokens), num_tokens=num_tokens)


def from_file(path: Path, num_prompts: int | None, default_output: int) -> list[Prompt]:
    """Read a JSONL file. Raises ConfigError that names the line."""
    if not path.is_file():
        raise ConfigError(f"--dataset-path {path}: there is no such file.")
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines or (num_prompts or 0) > len(lines):
        raise ConfigError(
            f"{path} holds {len(lines)} prompts, fewer than the {num_prompts or 1} asked for; "
            "lower --num-prompts or add lines."
        )
    return [
        _line(line, f"{path}, line {number}", default_output)
        for number, line in enumerate(lines[:num_prompts], start=1)
    ]


def _line(line: str, where: str, default_output: int) -> Prompt:
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not valid JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: expected a JSON object, found {type(values).__name__}.")
    if unknown := [key for key in values if key not in LINE_KEYS]:
        hint = nearest(unknown[0], LINE_KEYS)
        raise ConfigError(
            f"{where}: unknown key {unknown[0]!r}; known are {', '.join(LINE_KEYS)}.{hint}"
        )
    output = values.get("output_len", default_output)
    if not isinstance(output, int) or output < 1:
        raise ConfigError(f"{where}: output_len must be a whole number above 0, found {output!r}.")
    return _content(values, where, output)


def _content(values: dict[str, Any], where: str, output: int) -> Prompt:
    given = [key for key in ("prompt", "messages", "input_ids") if key in values]
    if len(given) != 1:
        raise ConfigError(f"{where}: expected one of prompt, messages, input_ids; found {given}.")
    content = values[given[0]]
    if given == ["prompt"] and isinstance(content, str):
        return Prompt(output, text=content)
    if not isinstance(content, list) or not content:
        raise ConfigError(f"{where}: {given[0]} has the wrong type, {type(content).__name__}.")
    if given == ["messages"]:
        return Prompt(output, messages=tuple(content))
    return Prompt(output, ids=tuple(content), num_tokens=len(content))


def _other_beginning(prompt: Prompt, place: int) -> Prompt:
    if prompt.ids is not None:
        return replace(prompt, ids=prompt.ids[::-1])
    if prompt.text is not None:
        return replace(prompt, text=f"[{place}] {prompt.text}")
    first, *rest = prompt.messages or ()
    return replace(prompt, messages=({**first, "content": f"[{place}] {first['content']}"}, *rest))
