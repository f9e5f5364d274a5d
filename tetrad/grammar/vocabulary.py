"""The vocabulary as grammars see it: the bytes of every token."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from tetrad.core.gguf import GgufFile, is_gguf
from tetrad.core.gguf_arch import CONTROL
from tetrad.core.token_bytes import bytes_of


@dataclass(frozen=True)
class VocabularySource:
    """Where it comes from."""

    path: str
    """A folder with tokenizer.json, or a GGUF file."""
    size: int
    """Rows of the model's head."""
    end_ids: tuple[int, ...]
    """Tokens that end an answer."""
    is_lent: bool = False
    """To a model of a larger vocabulary: token i then reads as token i modulo the tokenizer's."""


def breaks_json(token: bytes) -> bool:
    """Does it hold a control character that JSON has no place for? A tab it has, but only between
    two signs, where it is not needed. xgrammar lets all of them into a string with a minLength or
    maxLength."""
    return any(byte < 0x20 and byte not in b"\n\r" for byte in token)


BLANKS = b" \t\n\r"
_LINE_ENDS = re.compile(rb"[\r\n]")
_BLANK_LINE = re.compile(rb"\n[ \t\r]*\n|\r[ \t]*\r")


def has_blank_line(token: bytes) -> bool:
    """Do two line ends stand in it with nothing but white space between?"""
    return _BLANK_LINE.search(token) is not None


def ends_line_first(token: bytes) -> bool:
    """Is there a line end before its first sign?"""
    return _LINE_ENDS.search(token, 0, len(token) - len(token.lstrip(BLANKS))) is not None


def ends_line_last(token: bytes) -> bool:
    """Is there one behind its last sign?"""
    return _LINE_ENDS.search(token, len(token.rstrip(BLANKS))) is not None


def read_vocabulary(source: VocabularySource) -> list[bytes]:
    """Bytes of each token. Control tokens have none, which no grammar allows then, and neither have
    rows without a token."""
    path = Path(source.path)
    named = _of_gguf(path) if is_gguf(path) else _of_tokenizer(path)
    num_known = 1 + max(named)
    known = [b""] * max(num_known, source.size)
    for token_id, name in named.items():
        known[token_id] = bytes_of(name)
    if source.is_lent:
        return [known[token_id % num_known] for token_id in range(source.size)]
    return known[: source.size]


def _of_tokenizer(folder: Path) -> dict[int, str]:
    """Token id → name; "" for control tokens."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    added = tokenizer.get_added_tokens_decoder()
    return {
        token_id: "" if token_id in added and _is_control(added[token_id]) else name
        for name, token_id in tokenizer.get_vocab(with_added_tokens=True).items()
    }


def _is_control(token: tokenizers.AddedToken) -> bool:
    """DeepSeek's mark of tool calls is special by name only: it is part of what calls are."""
    return token.special and "DSML" not in token.content


def _of_gguf(path: Path) -> dict[int, str]:
    file = GgufFile.read(path)
    names, kinds = (
        file.get("tokenizer.ggml.tokens", list),
        file.get("tokenizer.ggml.token_type", list),
    )
    return {
        token_id: "" if kind == CONTROL else str(name)
        for token_id, (name, kind) in enumerate(zip(names, kinds, strict=False))
    }
