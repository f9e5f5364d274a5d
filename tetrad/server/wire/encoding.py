"""JSON and server-sent events as bytes."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
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


class GrowingList:
    """A list that is only added to: what it holds is encoded once, however often it is told."""

    def __init__(self) -> None:
        self._raw = bytearray(b"[")

    def add(self, values: Sequence[Any]) -> None:
        """Add plain data."""
        if values:
            if len(self._raw) > 1:
                self._raw += b","
            self._raw += memoryview(_encoder.encode(values))[1:-1]

    @property
    def unclosed(self) -> bytearray:
        """Its JSON without the bracket at the end."""
        return self._raw


def grow(lists: Mapping[str, GrowingList], more: Mapping[str, Sequence[Any]]) -> None:
    """Add to each what goes by the same name."""
    for name, values in more.items():
        lists[name].add(values)


_GROWN = uuid.uuid4().hex
"""Stands where such a list will; nobody can know it beforehand."""


def json_pieces(value: Any) -> list[bytes | bytearray]:
    """JSON of plain data that may have GrowingLists in it, of which nothing is copied."""
    grown: list[GrowingList] = []

    def hook(found: Any) -> str:
        grown.append(found)
        return _GROWN

    around = msgspec.json.encode(value, enc_hook=hook).split(f'"{_GROWN}"'.encode())
    pieces: list[bytes | bytearray] = [around[0]]
    for found, after in zip(grown, around[1:], strict=True):
        pieces += found.unclosed, b"]" + after
    return pieces


def grown_event(value: Any) -> bytes:
    """One event with such lists."""
    return b"".join((b"data: ", *json_pieces(value), b"\n\n"))


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
