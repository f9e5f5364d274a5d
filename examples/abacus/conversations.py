"""From problems to token ids: rendering, loss masks and batches. No torch.

Training reads exactly what a server would send: every conversation goes through the chat template
that ships with the model. The loss is taken on what the assistant says and on the role token that
ends its turn, because producing that token is how the model stops.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
from tokenizers import Tokenizer

from tetrad.bench.eval import phrases
from tetrad.bench.eval.problems import MAKERS, Message, Problem

ASSISTANT, USER, OBSERVATION, PAD = "<|assistant|>", "<|user|>", "<|observation|>", "<|endoftext|>"

# What rows of each length are made of: kinds with their weights. A row holds several conversations;
# long ones have rows of their own, because attention's cost grows with the row.
MIXTURES: dict[int, dict[str, float]] = {
    128: {
        "sum2": 10,
        "sum3": 14,
        "difference2": 10,
        "difference3": 17,
        "product": 12,
        "comparison": 9,
        "sum2_direct": 8,
        "sum3_direct": 22,
        "difference2_direct": 8,
        "difference3_direct": 24,
        "product_direct": 16,
        "comparison_direct": 7,
        "chat": 6,
    },
    256: {"history": 45, "follow_up": 40, "lookup": 15},
    640: {"lookup": 60, "tool_call": 16, "tool_result": 16, "history": 4, "chat": 4},
}

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a careful assistant. Be brief.",
    "You are Abacus.",
    "You are a calculator.",
    "Answer the question.",
    "Answer in one line.",
    "Be polite and precise.",
    "Think step by step.",
    "You are an expert in mathematics. Check every step before you answer.",
    "You are a helpful AI assistant that answers questions of people who learn arithmetic.",
)


def template_environment() -> jinja2.Environment:
    """Jinja as chat templates expect it: `tojson` writes plain JSON, not HTML."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = json.dumps
    return environment


@dataclass(frozen=True)
class Writer:
    """Turns problems into text and token ids with the files that ship."""

    tokenizer: Tokenizer
    template: jinja2.Template

    @classmethod
    def load(cls, folder: Path) -> "Writer":
        """From a folder with tokenizer.json and chat_template.jinja."""
        template = template_environment().from_string((folder / "chat_template.jinja").read_text())
        return cls(Tokenizer.from_file(str(folder / "tokenizer.json")), template)

    def prompt(self, problem: Problem) -> str:
        """What the server would send."""
        return self.template.render(
            messages=problem.messages,
            tools=problem.tools,
            enable_thinking=problem.thinking,
            add_generation_prompt=True,
        )

    def whole(self, problem: Problem) -> str:
        """The prompt, the right reply, and the role token that ends it."""
        end = OBSERVATION if problem.reply.get("tool_calls") else USER
        return self.template.render(messages=replied(problem), tools=problem.tools) + end

    def encode(self, text: str) -> list[int]:
        """Token ids; special tokens are recognised in the text."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def token(self, text: str) -> int:
        """The id of one special token."""
        found = self.tokenizer.token_to_id(text)
        if found is None:
            raise ValueError(f"the tokenizer has no token {text!r}")
        return found


def replied(problem: Problem) -> list[Message]:
    """The conversation with its reply; without thinking the reply has no reasoning."""
    reply = dict(problem.reply)
    if not problem.thinking:
        reply.pop("reasoning_content", None)
    return [*problem.messages, reply]


def loss_mask(ids: Sequence[int], assistant_id: int, end_ids: set[int]) -> np.ndarray:
    """True where a token is the assistant's own, or ends its turn.

    The token after `<|assistant|>` is `<think>` or `</think>`: in the prompt, never the model's.
    """
    mask = np.zeros(len(ids), dtype=bool)
    speaking, opening = False, False
    for position, token in enumerate(ids):
        mask[position] = speaking and not opening
        opening = token == assistant_id
        speaking = opening or (speaking and token not in end_ids)
    return mask


def dress(rng: random.Random, problem: Problem) -> Problem:
    """Variety that the evaluation does not need: system prompts, no thinking, idle tools."""
    changes: dict[str, Any] = {}
    if rng.random() < 0.15:
        system = {"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}
        changes["messages"] = [system, *problem.messages]
    if rng.random() < 0.15:
        changes["thinking"] = False
    if problem.kind == "chat" and rng.random() < 0.2:
        changes["tools"] = phrases.draw_tools(rng)
    return replace(problem, **changes)


class Batch(NamedTuple):
    """Arrays [rows, tokens]: ids, the number of each token's document (-1: padding), loss mask."""

    ids: np.ndarray
    documents: np.ndarray
    mask: np.ndarray

    @classmethod
    def empty(cls, num_rows: int, num_tokens: int, pad: int) -> "Batch":
        """All padding."""
        shape = (num_rows, num_tokens)
        ids, documents = np.full(shape, pad, np.int64), np.full(shape, -1, np.int64)
        return cls(ids, documents, np.zeros(shape, bool))


PATIENCE = 4  # conversations in a row that fit nowhere before a batch is full
SHORTEST = 18  # tokens; a row with less room is closed


@dataclass
class BatchMaker:
    """Makes padded training batches; each worker process has its own."""

    writer: Writer
    rng: random.Random

    def __post_init__(self) -> None:
        token = self.writer.token
        self.pad, self.assistant = token(PAD), token(ASSISTANT)
        self.ends = {token(USER), token(OBSERVATION)}

    def conversation(self, num_tokens: int) -> list[int]:
        """One conversation that fits."""
        mixture = MIXTURES[num_tokens]
        while True:
            kind = self.rng.choices(list(mixture), list(mixture.values()))[0]
            problem = dress(self.rng, MAKERS[kind](self.rng, False))
            ids = self.writer.encode(self.writer.whole(problem))
            if len(ids) <= num_tokens:
                return ids

    def batch(self, num_rows: int, num_tokens: int) -> Batch:
        """Rows filled in turn: each conversation goes to the first open row with room for it."""
        batch = Batch.empty(num_rows, num_tokens, self.pad)
        used = [0] * num_rows
        first_open, misses = 0, 0
        while misses < PATIENCE:
            tokens = self.conversation(num_tokens)
            room = (r for r in range(first_open, num_rows) if used[r] + len(tokens) <= num_tokens)
            row = next(room, None)
            if row is None:
                misses += 1
                continue
            part = slice(used[row], used[row] + len(tokens))
            batch.ids[row, part] = tokens
            batch.documents[row, part] = used[row]
            batch.mask[row, part] = loss_mask(tokens, self.assistant, self.ends)
            used[row] += len(tokens)
            while first_open < num_rows and used[first_open] > num_tokens - SHORTEST:
                first_open += 1
        return batch
