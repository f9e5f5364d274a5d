"""generated-shared-prefix: groups of prompts that begin alike, and conversations within them.

The lengths are exact: a prompt has the group's `--gsp-system-prompt-len` tokens and the question's.
A later turn's prompt is the one before, an answer of the length that was asked for, and the next
question. The answers are drawn beforehand, so that every server gets the same load whatever its
model says; the price is that a server finds the questions in its cache, but not its own answers.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

from tetrad.bench.options.serve import BenchServeConfig
from tetrad.bench.workload.requests import Prompt, Seeds, known, sends_text, uniform
from tetrad.bench.workload.tokens import Vocabulary


def draw_groups(
    config: BenchServeConfig, seeds: Seeds, vocabulary: Vocabulary | None
) -> list[Prompt]:
    """All prompts in the order of sending; a conversation's follow each other."""
    count = config.gsp_num_groups * config.gsp_prompts_per_group
    shape = random.Random(f"groups {seeds.shape}")
    ratio, turns = config.gsp_range_ratio, config.gsp_num_turns
    system = uniform(shape, config.gsp_system_prompt_len, ratio, config.gsp_num_groups)
    questions = uniform(shape, config.gsp_question_len, ratio, count * turns)
    outputs = uniform(shape, config.gsp_output_len, ratio, count)
    groups = group_of_each(config, shape)
    order = list(range(count))
    if not config.gsp_ordered:
        shape.shuffle(order)
    writer = Writer(known(vocabulary), random.Random(f"content {seeds.content}"), config)
    beginnings = [writer.begin(length) for length in system]
    prompts: list[Prompt] = []
    for place in order:
        asked = questions[place * turns : (place + 1) * turns]
        begun = beginnings[groups[place]]
        prompts += writer.conversation(begun, asked, outputs[place], len(prompts))
    return prompts


def group_of_each(config: BenchServeConfig, rng: random.Random) -> list[int]:
    """The group of each conversation, ascending: so many for each, or by Zipf's law, in which group
    r (from 1) has the weight 1 / r ** alpha."""
    count, num_groups = config.gsp_prompts_per_group, config.gsp_num_groups
    if config.gsp_zipf_alpha is None:
        return [group for group in range(num_groups) for _ in range(count)]
    weights = [rank**-config.gsp_zipf_alpha for rank in range(1, num_groups + 1)]
    return sorted(rng.choices(range(num_groups), weights, k=count * num_groups))


class Writer:
    """Prompts that grow: as token ids, as text, or as messages."""

    def __init__(self, words: Vocabulary, rng: random.Random, config: BenchServeConfig) -> None:
        self.words = words
        self.rng = rng
        self.as_text = sends_text(config)

    def begin(self, num_tokens: int) -> Prompt:
        """A beginning, to be shared."""
        if self.as_text:
            text = self.words.draw_text(self.rng, num_tokens)
            return Prompt(1, text=text, num_tokens=num_tokens)
        ids = tuple(self.words.draw_ids(self.rng, num_tokens))
        return Prompt(1, ids=ids, num_tokens=num_tokens)

    def grown(self, prompt: Prompt, more: int) -> Prompt:
        """The prompt with so many tokens more."""
        total = (prompt.num_tokens or 0) + more
        if prompt.text is not None:
            text = self.words.draw_text(self.rng, total, prompt.text)
            return replace(prompt, text=text, num_tokens=total)
        ids = (prompt.ids or ()) + tuple(self.words.draw_ids(self.rng, more))
        return replace(prompt, ids=ids, num_tokens=total)

    def conversation(
        self, begun: Prompt, questions: list[int], output: int, place: int
    ) -> list[Prompt]:
        """One prompt a question; each but the first waits for the one before. `place` is the index
        of the first."""
        first = replace(self.grown(begun, questions[0]), output_tokens=output)
        if self.as_text and len(questions) > 1:
            return self._messages(first, questions, place)
        prompts = [first]
        for turn, question in enumerate(questions[1:]):
            grown = self.grown(prompts[-1], output + question)
            prompts.append(replace(grown, after=place + turn))
        return prompts

    def _messages(self, first: Prompt, questions: list[int], place: int) -> list[Prompt]:
        """Chat keeps question and answer apart; the length is the sum of theirs."""
        said = [{"role": "user", "content": first.text}]
        total = first.num_tokens or 0
        prompts = [replace(first, text=None, messages=tuple(said))]
        for turn, question in enumerate(questions[1:]):
            lengths = (first.output_tokens, question)
            texts = [self.words.draw_text(self.rng, length) for length in lengths]
            for role, text in zip(("assistant", "user"), texts, strict=True):
                said.append({"role": role, "content": text})
            total += sum(lengths)
            messages = tuple(itertools.chain(said))
            prompts.append(
                replace(prompts[0], messages=messages, num_tokens=total, after=place + turn)
            )
        return prompts
