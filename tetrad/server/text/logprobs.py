"""Log-probabilities in the shapes clients read.

A token's text offset is the number of characters before it in the text of its choice. Where readers
of text are told, tokens of a stop string are not reported, like the string itself, so entries wait
as long as their text waits. SGLang's native route reports every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tetrad.core.request import TokenLogprob
from tetrad.server.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot hold (OpenAI's convention)."""


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One generated token with its log-probabilities and its place in the text."""

    values: TokenLogprob
    text_offset: int


def chat_logprobs(tokenizer: Tokenizer, entries: list[TokenEntry]) -> dict[str, Any]:
    """`choices[].logprobs` of chat completions."""
    return {
        "content": [
            _chat_token(tokenizer, entry.values.token_id, entry.values.logprob)
            | {"top_logprobs": [_chat_token(tokenizer, *pair) for pair in entry.values.top]}
            for entry in entries
        ]
    }


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    text = raw.decode("utf-8", errors="replace")
    return {"token": text, "logprob": max(logprob, LOWEST), "bytes": list(raw)}


def completion_logprobs(tokenizer: Tokenizer, entries: list[TokenEntry]) -> dict[str, list[Any]]:
    """`choices[].logprobs` of completions: parallel lists. The sampled token is among the likeliest
    of its place, whether it is one of them or not, as OpenAI and vLLM have it."""
    return {
        "tokens": [_completion_token(tokenizer, e.values.token_id) for e in entries],
        "token_logprobs": [max(e.values.logprob, LOWEST) for e in entries],
        "top_logprobs": [
            {
                _completion_token(tokenizer, token_id): max(value, LOWEST)
                for token_id, value in (*e.values.top, (e.values.token_id, e.values.logprob))
            }
            for e in entries
        ],
        "text_offset": [e.text_offset for e in entries],
    }


def _completion_token(tokenizer: Tokenizer, token_id: int) -> str:
    """Its text, or OpenAI's `bytes:\\xe2\\x80` for a part of a character: as U+FFFD all such tokens
    would be one."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def native_logprobs(values: Sequence[TokenLogprob], num_top: int) -> dict[str, list[Any]]:
    """The `meta_info` fields of SGLang: [logprob, token id, null] per entry of `output_ids`. Those
    of the prompt, of which nothing can be asked, are there and empty, as they are there then."""
    told: dict[str, list[Any]] = {
        "input_token_logprobs": [],
        "output_token_logprobs": [[max(v.logprob, LOWEST), v.token_id, None] for v in values],
    }
    if num_top:
        told["input_top_logprobs"] = []
        told["output_top_logprobs"] = [
            [[max(value, LOWEST), token_id, None] for token_id, value in v.top] for v in values
        ]
    return told
