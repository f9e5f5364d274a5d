"""Prompts from files: JSONL of prompts, of chat requests, and ShareGPT's conversations.

Every reader gives prompts in the file's order, but for ShareGPT, whose conversations are shuffled
as SGLang does. A line that cannot be used is an error that names it; nothing is skipped in silence,
except what SGLang leaves out of conversations too: those with one turn, too short or too long.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from tetrad.bench.options.serve import BenchServeConfig
from tetrad.bench.workload.requests import Prompt, Seeds
from tetrad.bench.workload.template import ChatTemplate
from tetrad.bench.workload.tokens import Vocabulary
from tetrad.core.errors import ConfigError, nearest

Line = dict[str, Any]
CONTENT_KEYS = ("prompt", "messages", "turns", "input_ids", "conversations", "conversation")
LENGTH_KEYS = ("output_len", "max_tokens", "max_completion_tokens")
OURS = ("messages", "model", "stream", "stream_options")
"""Fields of a chat request that the run decides."""
LEAST_TOKENS = 2
"""Conversations with a shorter prompt or answer are left out, as SGLang does."""


def read(config: BenchServeConfig, seeds: Seeds, vocabulary: Vocabulary | None) -> list[Prompt]:
    """The prompts of the sharegpt, custom and openai datasets."""
    path = config.dataset_path
    assert path is not None
    entries = lines_of(path)[config.dataset_offset :]
    if config.dataset_name == "sharegpt":
        random.Random(f"order {seeds.shape}").shuffle(entries)
    reader = _Reader(config, vocabulary)
    wanted = config.num_prompts
    prompts: list[Prompt] = []
    for where, line in entries:
        prompts += reader.prompts(line, where, len(prompts))
        if wanted is not None and len(prompts) >= wanted:
            break
    if not prompts or len(prompts) < (wanted or 0):
        raise ConfigError(
            f"{path} holds {len(prompts)} prompts that can be sent, fewer than the {wanted or 1} "
            "asked for; lower --num-prompts or add lines."
        )
    return prompts[:wanted]


def lines_of(path: Path) -> list[tuple[str, Line]]:
    """(where it is, parsed object) for each entry of a JSONL file or a JSON list."""
    if not path.is_file():
        raise ConfigError(f"--dataset-path {path}: there is no such file.")
    found = path.stat()
    return _lines_of(path, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=1)
def _lines_of(path: Path, _mtime_ns: int, _size: int) -> list[tuple[str, Line]]:
    """Read once although it is looked at before the server is, and by every repetition."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no UTF-8 text: {error}.") from error
    if text.lstrip().startswith("["):
        listed = _parsed(text, str(path))
        found = [(f"{path}, entry {number}", entry) for number, entry in enumerate(listed, start=1)]
    else:
        numbered = enumerate(text.split("\n"), start=1)
        found = [
            (f"{path}, line {number}", _parsed(line, f"{path}, line {number}"))
            for number, line in numbered
            if line.strip()
        ]
    for where, entry in found:
        if not isinstance(entry, dict):
            raise ConfigError(f"{where}: expected a JSON object, found {type(entry).__name__}.")
    return found


def texts_of(path: Path, offset: int) -> list[str]:
    """The first turn of every conversation, or the prompt of every line, from entry `offset` on."""
    texts = []
    for where, line in lines_of(path)[offset:]:
        turns = _conversation(line, where)
        text = turns[0] if turns else line.get("prompt")
        if isinstance(text, str) and text:
            texts.append(text)
    if not texts:
        raise ConfigError(
            f"{path} holds no conversation and no prompt that is text, from entry {offset} on."
        )
    return texts


def marked(prompt: Prompt, mark: int) -> Prompt:
    """The same prompt with another beginning, which no cache has seen."""
    if prompt.ids is not None:
        turn = 1 + mark % max(1, len(prompt.ids) - 1)
        return replace(prompt, ids=prompt.ids[turn:] + prompt.ids[:turn])
    if prompt.text is not None:
        return replace(prompt, text=f"[{mark}] {prompt.text}", num_tokens=None)
    first, *rest = prompt.messages or ()
    content = first["content"]
    if not isinstance(content, str):
        return prompt
    messages = ({**first, "content": f"[{mark}] {content}"}, *rest)
    return replace(prompt, messages=messages, num_tokens=None)


class _Reader:
    def __init__(self, config: BenchServeConfig, vocabulary: Vocabulary | None) -> None:
        self.config = config
        self.vocabulary = vocabulary
        self.is_openai = config.dataset_name == "openai"
        self.template = None
        if config.apply_chat_template:
            if vocabulary is None:
                raise ConfigError(
                    "--apply-chat-template reads the tokenizer's folder; give --tokenizer FOLDER."
                )
            self.template = ChatTemplate(vocabulary.folder)

    def prompts(self, line: Line, where: str, place: int) -> list[Prompt]:
        """What a line makes: one prompt, several turns, or none when it is left out."""
        self._check_keys(line, where)
        if (turns := _conversation(line, where)) is not None:
            return self._first_turn(turns, where)
        output = self._output_tokens(line, where)
        if "turns" in line:
            return self._all_turns(line["turns"], where, output, place)
        return [self._finished(_content(line, where, output), line)]

    def _check_keys(self, line: Line, where: str) -> None:
        known = (*CONTENT_KEYS, *LENGTH_KEYS)
        has_more = self.is_openai or "conversations" in line or "conversation" in line
        if (unknown := [key for key in line if key not in known]) and not has_more:
            hint = nearest(unknown[0], known)
            raise ConfigError(
                f"{where}: unknown key {unknown[0]!r}; known are {', '.join(known)}.{hint}"
            )
        given = [key for key in CONTENT_KEYS if key in line]
        if len(given) != 1 or (self.is_openai and given != ["messages"]):
            wanted = "messages" if self.is_openai else f"one of {', '.join(CONTENT_KEYS)}"
            raise ConfigError(f"{where}: expected {wanted}; found {given}.")

    def _output_tokens(self, line: Line, where: str) -> int:
        if self.config.sharegpt_output_len is not None:
            return self.config.sharegpt_output_len
        named = next((key for key in LENGTH_KEYS if key in line), None)
        output = self.config.random_output_len if named is None else line[named]
        if type(output) is not int or output < 1:
            raise ConfigError(f"{where}: {named} must be a whole number above 0, found {output!r}.")
        return output

    def _first_turn(self, turns: list[str], where: str) -> list[Prompt]:
        """SGLang's reading of a conversation: its first question, as long as its first answer."""
        if len(turns) < 2:
            return []
        prompt = self._finished(Prompt(1, text=turns[0]), {})
        output = self.config.sharegpt_output_len
        if output is None:
            if self.vocabulary is None:
                raise ConfigError(
                    f"{where}: the answer's length needs the model's tokenizer; give --tokenizer "
                    "FOLDER or --sharegpt-output-len."
                )
            output = self.vocabulary.count(turns[1])
        num_tokens = prompt.num_tokens or LEAST_TOKENS
        most = self.config.sharegpt_context_len
        if min(num_tokens, output) < LEAST_TOKENS or (most and num_tokens + output > most):
            return []
        return [replace(prompt, output_tokens=output)]

    def _all_turns(self, turns: Any, where: str, output: int, place: int) -> list[Prompt]:
        """Questions and answers by turns, from the file; each question is a request that waits for
        the one before, with the file's answers as its history."""
        if not isinstance(turns, list) or not all(isinstance(t, str) and t for t in turns):
            raise ConfigError(f"{where}: turns must be a list of texts, question first.")
        roles = ("user", "assistant")
        said = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
        ends = range(1, len(said) + 1, 2)
        prompts = [
            Prompt(output, messages=tuple(said[:end]), after=place + i - 1 if i else None)
            for i, end in enumerate(ends)
        ]
        return [self._finished(prompt, {}) for prompt in prompts]

    def _finished(self, prompt: Prompt, line: Line) -> Prompt:
        """Suffix, template, tokens: what the flags ask for."""
        if prompt.text is not None and self.config.prompt_suffix:
            prompt = replace(prompt, text=prompt.text + self.config.prompt_suffix)
        if self.template is not None and prompt.ids is None:
            said = prompt.messages or ({"role": "user", "content": prompt.text},)
            prompt = replace(prompt, text=self.template.render(said), messages=None)
        if prompt.text is not None and self.vocabulary is not None:
            ids = self.vocabulary.encode(prompt.text)
            prompt = replace(prompt, num_tokens=len(ids))
            if self.config.tokenize_prompt:
                prompt = replace(prompt, text=None, ids=tuple(ids))
        if self.is_openai:
            extra = {k: v for k, v in line.items() if k not in (*OURS, *LENGTH_KEYS)}
            prompt = replace(prompt, extra=extra)
        return prompt


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not valid JSON: {error}.") from error


def _conversation(line: Line, where: str) -> list[str] | None:
    """The texts of a ShareGPT conversation in order; None when the line is none."""
    said = line.get("conversations", line.get("conversation"))
    if said is None:
        return None
    try:
        texts = [turn["value"] if "value" in turn else turn["content"] for turn in said]
    except (TypeError, KeyError):
        texts = [None]
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(
            f"{where}: a conversation is a list of objects with a text under value or content."
        )
    return texts


def _content(values: Line, where: str, output: int) -> Prompt:
    name = next(key for key in CONTENT_KEYS if key in values)
    content = values[name]
    if name == "prompt" and isinstance(content, str):
        return Prompt(output, text=content)
    if name == "prompt" or not isinstance(content, list) or not content:
        raise ConfigError(f"{where}: {name} has the wrong type, {type(content).__name__}.")
    if name == "messages":
        if not all(isinstance(message, dict) and "content" in message for message in content):
            raise ConfigError(f"{where}: every message must be an object with content.")
        return Prompt(output, messages=tuple(content))
    if not all(type(item) is int and item >= 0 for item in content):
        raise ConfigError(f"{where}: input_ids must be whole numbers.")
    return Prompt(output, ids=tuple(content), num_tokens=len(content))
