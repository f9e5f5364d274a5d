"""JSON and server-sent events as bytes."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import msgspec

_encoder = msgspec.json.Encoder()

DONE = b"data: [DONE]\n\n"


def json_bytes(value: Any) -> bytes:
    """Compact UTF-8 JSON of plain data."""
    return _encoder.encode(value)


def json_text(value: Any) -> str:
    """The same as text."""
    return _encoder.encode(value).decode()


def event(value: Any, name: str = "") -> bytes:
    """One event; JSON never holds a raw newline, so its data is one line. `name`, if it has one,
    stands on a line before."""
    before = f"event: {name}\n".encode() if name else b""
    return before + b"data: " + _encoder.encode(value) + b"\n\n"


class TextEvent:
    """Events that differ in one text. All around it is encoded once: a stream has an event for
    every token, and its id, its model and the rest are the same in each."""

    _MARK = uuid.uuid4().hex
    """Stands where the text will; nobody can know it beforehand."""

    def __init__(self, value_of: Callable[[str], Any], name: str = "") -> None:
        """`value_of` puts a text into its place in the JSON value."""
        whole = event(value_of(self._MARK), name)
        self._before, self._after = whole.split(_encoder.encode(self._MARK))

    def __call__(self, text: str) -> bytes:
        """The event with `text`, the bytes that `event` would give."""
        return self._before + _encoder.encode(text) + self._after
