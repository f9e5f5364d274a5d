"""mooncake: a trace of requests with time stamps, lengths and the blocks that they share.

Format: JSONL of Mooncake's published traces (kvcache-ai/Mooncake, FAST25-release): timestamp in
milliseconds, input_length and output_length in tokens, hash_ids of the prompt's blocks of 512
tokens. Requests with the same first ids begin alike. A trace may lack timestamp and hash_ids: then
it is a list of lengths.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from tetrad.bench.options.serve import BenchServeConfig
from tetrad.bench.workload.files import lines_of
from tetrad.bench.workload.prefixes import Writer
from tetrad.bench.workload.requests import Prompt, Seeds, known, sends_text
from tetrad.bench.workload.tokens import Vocabulary
from tetrad.core.errors import ConfigError

BLOCK_TOKENS = 512
Line = dict[str, Any]


def read_trace(
    config: BenchServeConfig, seeds: Seeds, vocabulary: Vocabulary | None
) -> list[Prompt]:
    """The trace's requests by time stamp, each with as many rounds as asked for."""
    assert config.dataset_path is not None
    entries = lines_of(config.dataset_path)[config.dataset_offset :]
    for where, line in entries:
        _check(line, where, needs_time=config.use_trace_timestamps)
    if not entries or len(entries) < (config.num_prompts or 0):
        raise ConfigError(
            f"{config.dataset_path} holds {len(entries)} requests, fewer than the "
            f"{config.num_prompts or 1} asked for; lower --num-prompts."
        )
    lines = [line for _, line in entries[: config.num_prompts]]
    lines.sort(key=lambda line: float(line.get("timestamp", 0)))
    start = lines[0].get("timestamp", 0)
    blocks = Blocks(known(vocabulary), seeds.content)
    writer = Writer(blocks.words, random.Random(f"content {seeds.content}"), config)
    prompts: list[Prompt] = []
    for line in lines:
        first = blocks.prompt(line, len(prompts), as_text=sends_text(config))
        time_s = (line.get("timestamp", 0) - start) / 1e3 * config.mooncake_slowdown_factor
        questions = [0] + [line["input_length"]] * (config.mooncake_num_rounds - 1)
        turns = writer.conversation(first, questions, line["output_length"], len(prompts))
        prompts += [replace(turn, trace_s=time_s) for turn in turns]
    return prompts


def _check(line: Line, where: str, *, needs_time: bool) -> None:
    for key in ("input_length", "output_length"):
        if type(line.get(key)) is not int or line[key] < 1:
            raise ConfigError(
                f"{where}: {key} must be a whole number above 0, found {line.get(key)!r}."
            )
    stamp = line.get("timestamp", "nothing" if needs_time else 0)
    if not isinstance(stamp, int | float) or not 0 <= stamp < float("inf"):
        raise ConfigError(f"{where}: timestamp must be milliseconds, found {stamp!r}.")
    ids = line.get("hash_ids", [])
    if not isinstance(ids, list) or len(ids) * BLOCK_TOKENS >= line["input_length"] + BLOCK_TOKENS:
        raise ConfigError(
            f"{where}: hash_ids must be a list with one entry for every {BLOCK_TOKENS} tokens "
            f"of input_length {line['input_length']}."
        )


class Blocks:
    """The content behind hash ids, the same for the same id throughout a run."""

    def __init__(self, words: Vocabulary, seed: int) -> None:
        self.words = words
        self.seed = seed
        self._texts: dict[object, str] = {}

    def prompt(self, line: Line, place: int, *, as_text: bool) -> Prompt:
        """A prompt of exactly the line's length: whole blocks, then the beginning of the last one,
        or tokens of request `place`'s own where no id is left. As text the blocks are joined, so
        that what is shared stays shared, and tokens that merge where they meet are made up for at
        the end."""
        length, output = line["input_length"], line["output_length"]
        names = [str(name) for name in line.get("hash_ids", [])]
        whole = names[: length // BLOCK_TOKENS]
        last = names[len(whole)] if len(names) > len(whole) else f"of request {place}"
        if not as_text:
            ids = [i for name in whole for i in self.words.draw_ids(self._rng(name), BLOCK_TOKENS)]
            ids += self.words.draw_ids(self._rng(last), length - len(ids))
            return Prompt(output, ids=tuple(ids), num_tokens=length)
        begun = "".join(self._text(name) for name in whole)
        total = max(length, self.words.count(begun))
        text = self.words.draw_text(self._rng(last), total, begun)
        return Prompt(output, text=text, num_tokens=total)

    def _text(self, name: str) -> str:
        if name not in self._texts:
            self._texts[name] = self.words.draw_text(self._rng(name), BLOCK_TOKENS)
        return self._texts[name]

    def _rng(self, name: str) -> random.Random:
        return random.Random(f"block {self.seed} {name}")
