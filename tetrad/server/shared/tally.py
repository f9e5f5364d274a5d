"""Numbers that the API processes of a server share, so that each of them can tell the whole.

A table in memory: a row for each process, which only that process writes, and a column for each
number. What a process has counted stays when it dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from typing import Self

from tetrad.core.errors import UnsupportedError

NUM_COLUMNS = 1024
ROW_BYTES = NUM_COLUMNS * 8
PATIENCE_S = 0.2
RETRY_S = 0.0002

OPEN, UNANSWERED, UNANSWERED_TOKENS, IS_SERVING, BEAT_AT, LOST_STARTS = range(6)
"""Columns of a process's state: engine requests in flight, those of them without a first token and
the tokens of their prompts, whether it takes connections, when its event loop last turned (the
machine's monotonic clock), and how many of its starts in a row came to nothing."""
FIRST_OF_KEYS = 6
"""From here on two columns for each API key: its requests without a first token, and their prompt
tokens."""
MOST_KEYS = 256
FIRST_COUNTER = FIRST_OF_KEYS + 2 * (MOST_KEYS + 2)
"""The column at which counters begin, which never go back."""


class Tally:
    """The table, as one process sees it: `add` and `put` write its own row."""

    def __init__(self, num_rows: int = 1, row: int = 0, file: int = -1) -> None:
        """`file` is the descriptor of a table that others have too."""
        self.num_rows = num_rows
        self.file = file
        table = memoryview(mmap.mmap(file, num_rows * ROW_BYTES)).cast("d")
        self._rows = [
            table[start : start + NUM_COLUMNS] for start in range(0, len(table), NUM_COLUMNS)
        ]
        self._own = self._rows[row]

    @classmethod
    def shared(cls, num_rows: int) -> Self:
        """A new table for so many processes; ours is the first row."""
        if not hasattr(os, "memfd_create"):
            raise UnsupportedError(f"--api-workers {num_rows} needs Linux; 1 works here.")
        file = os.memfd_create("tetrad-tally")
        os.ftruncate(file, num_rows * ROW_BYTES)
        return cls(num_rows, 0, file)

    def add(self, column: int, amount: float = 1.0) -> None:
        self._own[column] += amount

    def put(self, column: int, value: float) -> None:
        self._own[column] = value

    def total(self, column: int) -> float:
        """Over all processes."""
        return sum(row[column] for row in self._rows)

    def each(self, column: int) -> list[float]:
        """By process."""
        return [row[column] for row in self._rows]

    def bury(self, row: int, lost_starts: int = 0) -> None:
        """Its process is gone: nothing is open there. What it counted stays."""
        for column in range(FIRST_COUNTER):
            self._rows[row][column] = 0.0
        self._rows[row][LOST_STARTS] = lost_starts

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """No other process is in such a block at the same time; a lock of a process that dies is
        free. Keep it short: others wait, though not for one that hangs in its block: rather a
        request too many than a server that hangs with it."""
        if self.file < 0:
            yield
            return
        is_locked = lock_within(self.file, PATIENCE_S)
        try:
            yield
        finally:
            if is_locked:
                fcntl.lockf(self.file, fcntl.LOCK_UN)


def lock_within(file: int, patience_s: float) -> bool:
    """Take the lock of a file that processes share; False if another has it for so long."""
    until = time.monotonic() + patience_s
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(RETRY_S)
        else:
            return True
