"""The header of a GGUF file: its metadata, and where its tensors lie. No tensor is read here.

A file is not trusted: every count and length is compared with what is left of the file before
anything is allocated or repeated for it, so that a damaged or hostile one costs one sentence.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from tetrad.core.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
HEADER_BYTES = 64 << 20
"""No header is larger: a vocabulary of 256,000 tokens with its merges takes 15 MB."""
MOST_ENTRIES = 1 << 21
"""Of an array, and of tensors."""
MOST_NAME_BYTES = 1 << 16
MOST_DIMENSIONS = 4

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q"} | {
    12: "d"
}
"""Type of a value → its letter for `struct`; 7 is a truth value."""
_BOOL, _STRING, _ARRAY = 7, 8, 9

TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
}  # fmt: skip
"""ggml's number of a type → name, numbers in a block, bytes of a block."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as everywhere here; the file has it the other way round."""
    type_name: str
    type_id: int
    offset: int
    """From the file's beginning."""
    nbytes: int

    @property
    def row_bytes(self) -> int:
        """Of the last axis."""
        return self.nbytes // prod(self.shape[:-1])


@dataclass(frozen=True)
class GgufFile:
    """A file's header."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @classmethod
    def read(cls, path: Path) -> GgufFile:
        """Read the header. Raises CheckpointError, in one sentence, for a file that is none."""
        path = path.resolve()
        try:
            stat = path.stat()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
        return _read(path, stat.st_mtime_ns)

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """A value of the metadata that must have a type. Raises CheckpointError."""
        value = self.metadata.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.path} lacks {key} in its metadata.")
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise CheckpointError(f"{self.path}: {key} has a value of another type than it must.")
        return value


def is_gguf(model: Path) -> bool:
    """Does a model's name mean a GGUF file?"""
    return model.suffix == ".gguf" and not model.is_dir()


@lru_cache(maxsize=2)
def _read(path: Path, _changed_ns: int) -> GgufFile:
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            header = file.read(min(size, HEADER_BYTES))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    cursor = _Cursor(path, header)
    if bytes(cursor.take(4)) != MAGIC:
        raise CheckpointError(f"{path} is no GGUF file: it does not begin with 'GGUF'.")
    if (version := cursor.number("I")) not in VERSIONS:
        raise CheckpointError(
            f"{path} is GGUF of version {version}, or of another byte order; "
            f"{' and '.join(map(str, VERSIONS))} are read."
        )
    num_tensors, num_values = cursor.count(24), cursor.count(13)
    metadata = {}
    for _ in range(num_values):
        key = cursor.text(MOST_NAME_BYTES)
        metadata[key] = cursor.value(cursor.number("I"))
    if not isinstance(num_parts := metadata.get("split.count", 0), int):
        raise CheckpointError(f"{path} is damaged: its split.count is no number.")
    if num_parts > 1:
        raise CheckpointError(f"{path} is one part of several; gguf-split --merge makes them one.")
    infos = [_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(f"{path} is damaged: its alignment is {alignment!r}.")
    start = -(-cursor.at // alignment) * alignment
    return GgufFile(path, metadata, _placed(path, infos, start, size))


def _tensor_info(cursor: _Cursor) -> GgufTensor:
    """With an offset from the beginning of the data."""
    name = cursor.text(MOST_NAME_BYTES)
    num_dimensions = cursor.number("I")
    if not 1 <= num_dimensions <= MOST_DIMENSIONS:
        raise cursor.damaged(f"'{name}' has {num_dimensions} axes")
    shape = tuple(cursor.number("Q") for _ in range(num_dimensions))[::-1]
    type_id, offset = cursor.number("I"), cursor.number("Q")
    if type_id not in TYPES:
        known = ", ".join(known for known, _, _ in TYPES.values())
        raise CheckpointError(
            f"{cursor.path} holds '{name}' in ggml's type {type_id}, which is not read; these are: "
            f"{known}."
        )
    type_name, block, block_bytes = TYPES[type_id]
    if min(shape) < 1 or prod(shape) >= 1 << 50 or shape[-1] % block:
        raise cursor.damaged(f"'{name}' has the shape {list(shape)} in {type_name}")
    return GgufTensor(name, shape, type_name, type_id, offset, prod(shape) // block * block_bytes)


def _placed(path: Path, infos: list[GgufTensor], start: int, size: int) -> dict[str, GgufTensor]:
    """Offsets from the file's beginning; all inside the file, none over another."""
    placed: dict[str, GgufTensor] = {}
    end = start
    for info in sorted(infos, key=lambda info: info.offset):
        if info.name in placed:
            raise CheckpointError(f"{path} is damaged: it names '{info.name}' twice.")
        offset = start + info.offset
        if offset + info.nbytes > size:
            raise CheckpointError(
                f"{path} is truncated: '{info.name}' ends at byte {offset + info.nbytes} of {size}."
            )
        if offset < end:
            raise CheckpointError(f"{path} is damaged: '{info.name}' lies over another tensor.")
        end = offset + info.nbytes
        placed[info.name] = GgufTensor(
            info.name, info.shape, info.type_name, info.type_id, offset, info.nbytes
        )
    return placed


class _Cursor:
    """Reads a header from its beginning on, never beyond its end."""

    def __init__(self, path: Path, header: bytes) -> None:
        self.path, self.at = path, 0
        self._header = memoryview(header)

    def damaged(self, found: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged: {found}.")

    def take(self, count: int) -> memoryview:
        """The next bytes."""
        if count > len(self._header) - self.at:
            raise self.damaged(
                f"its header wants {count} bytes at byte {self.at}, where {len(self._header)} end"
            )
        part = self._header[self.at : self.at + count]
        self.at += count
        return part

    def number(self, letter: str) -> Any:
        """The next number."""
        return struct.unpack(f"<{letter}", self.take(struct.calcsize(f"<{letter}")))[0]

    def count(self, entry_bytes: int) -> int:
        """The next number, of entries that take so many bytes at least."""
        count = int(self.number("Q"))
        if count > MOST_ENTRIES or count * entry_bytes > len(self._header) - self.at:
            raise self.damaged(f"it claims {count} entries at byte {self.at}")
        return count

    def text(self, most_bytes: int = HEADER_BYTES) -> str:
        """The next string."""
        length = int(self.number("Q"))
        if length > most_bytes:
            raise self.damaged(f"it claims a text of {length} bytes at byte {self.at}")
        return bytes(self.take(length)).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        """A value of the metadata."""
        if kind == _STRING:
            return self.text()
        if kind in _NUMBERS:
            found = self.number(_NUMBERS[kind])
            return bool(found) if kind == _BOOL else found
        if kind != _ARRAY:
            raise self.damaged(f"it holds a value of type {kind} at byte {self.at}")
        kind = self.number("I")
        if kind == _STRING:
            read: Callable[[], str] = self.text
            return [read() for _ in range(self.count(8))]
        if kind not in _NUMBERS:
            raise self.damaged(f"it holds an array of values of type {kind} at byte {self.at}")
        letter = _NUMBERS[kind]
        numbers: array[Any] = array(letter)
        numbers.frombytes(self.take(self.count(numbers.itemsize) * numbers.itemsize))
        return list(numbers)
