"""What can be asked for again: named values in a bounded place, which all API processes share.

    header │ names, a ring │ slots beside them: when it expires, where its bytes are │ bytes, a ring

Whoever puts something evicts the oldest until it fits. The place is memory of the system's, so that
a process that dies leaves it whole: a slot is written before the header counts it.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Iterator
from typing import NamedTuple, Self

from tetrad.core.errors import CapacityError, UnsupportedError
from tetrad.server.shared.tally import lock_within

MAX_BYTES = 64 << 20
"""Of all values together."""
MAX_VALUE_BYTES = 8 << 20
LIFETIME_S = 3600.0
PATIENCE_S = 2.0
"""With a process that hangs while it has the lock: it is soon ended."""

_HEADER = struct.Struct("=QQQ")
"""Number of the next slot, of the oldest one, and where the next bytes go; all only grow."""
_SLOT = struct.Struct("=dQQB")
"""When it expires by the monotonic clock, beginning, length, whether it is marked."""
NAME_BYTES = 16
_NO_NAME = bytes(NAME_BYTES)


class _Slot(NamedTuple):
    expires_at: float
    begin: int
    length: int
    is_marked: bool


class Shelf:
    """The place, as one process sees it. A name is 32 hexadecimal digits."""

    def __init__(self, num_slots: int, num_bytes: int = MAX_BYTES, file: int = -1) -> None:
        """`file` is the descriptor of a place that others have too."""
        self.file = file
        self.num_slots = num_slots
        self._num_bytes = num_bytes
        self._first_slot = _HEADER.size + num_slots * NAME_BYTES
        self._first_byte = self._first_slot + num_slots * _SLOT.size
        self._memory = mmap.mmap(file, self._first_byte + num_bytes)

    @classmethod
    def shared(cls, num_slots: int, num_bytes: int = MAX_BYTES) -> Self:
        """A new place that further processes can be handed by its `file`."""
        if not hasattr(os, "memfd_create"):
            raise UnsupportedError("Several API processes need Linux; --api-workers 1 works here.")
        file = os.memfd_create("tetrad-shelf")
        os.ftruncate(file, _HEADER.size + num_slots * (NAME_BYTES + _SLOT.size) + num_bytes)
        return cls(num_slots, num_bytes, file)

    def put(self, name: str, value: bytes) -> bool:
        """Keep `value` by that name, instead of what had it; False if it is too large."""
        if len(value) > min(MAX_VALUE_BYTES, self._num_bytes):
            return False
        with self._exclusive():
            if (found := self._find(name)) is not None:
                self._erase(found)
            self._append(bytes.fromhex(name), value)
        return True

    def get(self, name: str) -> bytes | None:
        """The value; None if there is none, no longer, or never was."""
        with self._exclusive():
            found = self._find(name)
            return None if found is None else self._value(self._slot(found))

    def drop(self, name: str) -> bool:
        """Forget it, and overwrite it; False if there is none."""
        with self._exclusive():
            if (found := self._find(name)) is None:
                return False
            self._erase(found)
            return True

    def mark(self, name: str) -> None:
        """Tell whoever works on it to stop."""
        with self._exclusive():
            if (found := self._find(name)) is not None:
                self._write(found, self._slot(found)._replace(is_marked=True))

    def is_wanted(self, name: str) -> bool:
        """Whether it is there, and nobody has marked it."""
        with self._exclusive():
            found = self._find(name)
            return found is not None and not self._slot(found).is_marked

    def _append(self, name: bytes, value: bytes) -> None:
        newest, oldest, begin = self._header()
        if begin % self._num_bytes + len(value) > self._num_bytes:
            begin += -begin % self._num_bytes  # a value never wraps around
        end = begin + len(value)
        while oldest < newest and (
            newest - oldest >= self.num_slots or self._slot(oldest).begin < end - self._num_bytes
        ):
            self._erase(oldest)
            oldest += 1
        at = self._first_byte + begin % self._num_bytes
        self._memory[at : at + len(value)] = value
        self._write(newest, _Slot(time.monotonic() + LIFETIME_S, begin, len(value), False))
        self._name(newest, name)
        _HEADER.pack_into(self._memory, 0, newest + 1, oldest, end)

    def _find(self, name: str) -> int | None:
        """The number of its slot."""
        try:
            wanted = bytes.fromhex(name)
        except ValueError:
            return None
        if len(wanted) != NAME_BYTES or wanted == _NO_NAME:
            return None  # an empty one Python 3.11.2 would find for ever
        newest, oldest = self._trim()
        at = _HEADER.size - 1
        while (at := self._memory.find(wanted, at + 1, self._first_slot)) >= 0:
            place, rest = divmod(at - _HEADER.size, NAME_BYTES)
            number = oldest + (place - oldest) % self.num_slots
            if rest == 0 and number < newest:
                return number
        return None

    def _trim(self) -> tuple[int, int]:
        """Erase what has expired, which is the oldest; returns the newest number and the oldest."""
        newest, oldest, begin = self._header()
        now, first = time.monotonic(), oldest
        while oldest < newest and self._slot(oldest).expires_at < now:
            self._erase(oldest)
            oldest += 1
        if oldest > first:
            _HEADER.pack_into(self._memory, 0, newest, oldest, begin)
        return newest, oldest

    def _header(self) -> tuple[int, int, int]:
        newest, oldest, begin = _HEADER.unpack_from(self._memory, 0)
        return newest, oldest, begin

    def _slot(self, number: int) -> _Slot:
        place = self._first_slot + number % self.num_slots * _SLOT.size
        return _Slot(*_SLOT.unpack_from(self._memory, place))

    def _write(self, number: int, slot: _Slot) -> None:
        place = self._first_slot + number % self.num_slots * _SLOT.size
        _SLOT.pack_into(self._memory, place, *slot)

    def _name(self, number: int, name: bytes) -> None:
        at = _HEADER.size + number % self.num_slots * NAME_BYTES
        self._memory[at : at + NAME_BYTES] = name

    def _value(self, slot: _Slot) -> bytes:
        at = self._first_byte + slot.begin % self._num_bytes
        return self._memory[at : at + slot.length]

    def _erase(self, number: int) -> None:
        self._name(number, _NO_NAME)
        slot = self._slot(number)
        at = self._first_byte + slot.begin % self._num_bytes
        self._memory[at : at + slot.length] = bytes(slot.length)
        self._write(number, slot._replace(length=0))

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """A lock of a process that dies is free; one that hangs is not waited for. Raises
        CapacityError."""
        if self.file < 0:
            yield
            return
        if not lock_within(self.file, PATIENCE_S):
            raise CapacityError("Another API process holds what is kept; try again later.")
        try:
            yield
        finally:
            fcntl.lockf(self.file, fcntl.LOCK_UN)
