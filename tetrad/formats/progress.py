"""How far reading a checkpoint has come, and how fast it goes, in lines for a person."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

_GB = 1e9
_BAR_CELLS = 24


class ByteProgress:
    """Turns (bytes done, bytes in total) into a line now and then, and a last one at the end.

    Used as `Checkpoint.on_bytes`, inside a `with` block; `show` gets each line.
    """

    def __init__(
        self,
        label: str,
        show: Callable[[str], None],
        *,
        every_s: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._label = label
        self._show = show
        self._every_s = every_s
        self._clock = clock
        self._start_s = self._shown_s = clock()
        self._done_bytes = 0

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Report progress; shows a line when the last one is `every_s` old."""
        self._done_bytes = done_bytes
        now_s = self._clock()
        if now_s - self._shown_s >= self._every_s:
            self._shown_s = now_s
            self._show(self._line(done_bytes, total_bytes, now_s - self._start_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Show the summary, unless the work failed."""
        if kind is None:
            seconds = self._clock() - self._start_s
            size, rate = _size(self._done_bytes), _rate(self._done_bytes, seconds)
            self._show(f"{self._label}: {size} in {seconds:.1f} s ({rate})")

    def _line(self, done_bytes: int, total_bytes: int, seconds: float) -> str:
        share = min(done_bytes / total_bytes, 1.0) if total_bytes else 1.0
        filled = round(share * _BAR_CELLS)
        bar = "█" * filled + "░" * (_BAR_CELLS - filled)
        size = f"{_size(done_bytes)} / {_size(total_bytes)}"
        return f"{self._label}: {bar} {share:4.0%}  {size}  {_rate(done_bytes, seconds)}"


class ConsoleProgress(ByteProgress):
    """A bar redrawn in place on a terminal; elsewhere a plain line every ten seconds."""

    def __init__(self, label: str, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._in_place = self._stream.isatty()
        super().__init__(label, self._write, every_s=0.1 if self._in_place else 10.0)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the terminal on a fresh line, whatever happened."""
        super().__exit__(kind, error, trace)
        if self._in_place:
            self._stream.write("\n")

    def _write(self, line: str) -> None:
        # "\x1b[K" clears what a longer line has left behind.
        self._stream.write(f"\r{line}\x1b[K" if self._in_place else f"{line}\n")
        self._stream.flush()


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GB:.2f} GB" if num_bytes >= _GB else f"{num_bytes / 1e6:.2f} MB"


def _rate(num_bytes: int, seconds: float) -> str:
    return f"{_size(round(num_bytes / max(seconds, 1e-9)))}/s"
