"""What a run sends: the dataset that was asked for, and a warm-up like it."""

from __future__ import annotations

import random
from dataclasses import replace

from tetrad.bench.options.serve import BenchServeConfig
from tetrad.bench.workload import files
from tetrad.bench.workload.prefixes import draw_groups
from tetrad.bench.workload.rates import covered, parse_profile
from tetrad.bench.workload.requests import (
    DEFAULT_NUM_PROMPTS,
    Prompt,
    Seeds,
    draw,
    known,
    random_lengths,
)
from tetrad.bench.workload.tokens import Vocabulary
from tetrad.bench.workload.trace import read_trace

WARMUP_OUTPUT_TOKENS = 32
FILES = ("sharegpt", "custom", "openai")


def build(config: BenchServeConfig, seeds: Seeds, vocabulary: Vocabulary | None) -> list[Prompt]:
    """The prompts of the run, in order."""
    if config.dataset_name == "generated-shared-prefix":
        return draw_groups(config, seeds, vocabulary)
    if config.dataset_name == "mooncake":
        return read_trace(config, seeds, vocabulary)
    if config.dataset_name in FILES:
        prompts = files.read(config, seeds, vocabulary)
        if not config.cache_bust:
            return prompts
        rng = random.Random(f"marks {seeds.content}")
        return _busted(prompts, rng)
    lengths = random_lengths(config, num_random(config), seeds.shape)
    if config.dataset_path is not None:
        return _cut_to_length(config, lengths, seeds, known(vocabulary))
    return draw(config, lengths, seeds.content, vocabulary)


def num_random(config: BenchServeConfig) -> int:
    """Prompts of the random datasets."""
    covers = covered(parse_profile(config.rate_profile)) if config.rate_profile else None
    return config.num_prompts or covers or DEFAULT_NUM_PROMPTS


def _busted(prompts: list[Prompt], rng: random.Random) -> list[Prompt]:
    """Each with a beginning of its own; a conversation's turns keep theirs in common."""
    marks: list[int] = []
    for prompt in prompts:
        marks.append(rng.getrandbits(32) if prompt.after is None else marks[prompt.after])
    return [files.marked(prompt, mark) for prompt, mark in zip(prompts, marks, strict=True)]


def _cut_to_length(
    config: BenchServeConfig, lengths: list[tuple[int, int]], seeds: Seeds, words: Vocabulary
) -> list[Prompt]:
    """Texts of a file, repeated or cut to the drawn lengths; every run takes others first."""
    assert config.dataset_path is not None
    texts = files.texts_of(config.dataset_path, config.dataset_offset)
    rng = random.Random(f"content {seeds.content}")
    rng.shuffle(texts)
    prompts = []
    for place, (num_tokens, output) in enumerate(lengths):
        text = words.fit_text(rng, texts[place % len(texts)], num_tokens)
        prompts.append(Prompt(output, text=text, num_tokens=num_tokens))
    if not config.tokenize_prompt:
        return prompts
    return [replace(p, ids=tuple(words.encode(p.text or "")), text=None) for p in prompts]


def warmup(
    config: BenchServeConfig, prompts: list[Prompt], seeds: Seeds, vocabulary: Vocabulary | None
) -> list[Prompt]:
    """Prompts of the same lengths whose beginning differs, so that they warm no cache entry."""
    shapes = [prompts[i % len(prompts)] for i in range(config.warmup_requests)]
    if config.dataset_name in FILES:
        drawn = [files.marked(shape, place) for place, shape in enumerate(shapes)]
    else:
        lengths = [(shape.num_tokens or 1, shape.output_tokens) for shape in shapes]
        drawn = draw(config, lengths, seeds.content + 1, vocabulary)
    return [
        replace(p, output_tokens=min(p.output_tokens, WARMUP_OUTPUT_TOKENS), after=None)
        for p in drawn
    ]
