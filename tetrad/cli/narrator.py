"""What a long command tells on stderr while it runs."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


DIM, PLAIN = "\x1b[2m", "\x1b[0m"
CLEAR_LINE = "\r\x1b[K"
LINE_S = 10.0
"""How long a load may go on in a log without a line."""


class Narrator:
    """Tells on stderr what happens: dimmed and with a bar on a terminal, in lines in a log."""

    def __init__(self, *, show_bar: bool = False) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._show_bar = show_bar
        self._bar: Progress | None = None
        self._num_requests = self._num_done = self._num_failed = 0
        self._began_at = self._told_at = 0.0
        self._said: set[str] = set()

    def say(self, line: str) -> None:
        """One line about what happens next."""
        shown = f"{CLEAR_LINE}{DIM}{line}{PLAIN}" if self._is_terminal else line
        print(shown, file=sys.stderr, flush=True)

    def say_once(self, line: str) -> None:
        """As `say`, unless it was said already."""
        if line not in self._said:
            self._said.add(line)
            self.say(line)

    def passing(self, line: str) -> None:
        """What is happening right now; on a terminal only, where the next line replaces it."""
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write(f"{CLEAR_LINE}{DIM}{line[:width]}{PLAIN}")
            sys.stderr.flush()

    def stage(self, line: str) -> None:
        """What happens for the next seconds: as `passing`, and in a log a line of its own."""
        if self._is_terminal:
            self.passing(line)
        elif line:
            self.say(line)

    def begin(self, num_requests: int) -> None:
        """The measured load starts."""
        self._num_requests, self._num_done, self._num_failed = num_requests, 0, 0
        self._began_at = self._told_at = time.monotonic()
        if self._show_bar and self._is_terminal:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as RichProgress

            self._bar = RichProgress(
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                refresh_per_second=2,
            )
            self._bar.add_task("requests", total=num_requests)
            self._bar.start()

    def finished(self, has_failed: bool) -> None:
        """One request has ended."""
        self._num_done += 1
        self._num_failed += has_failed
        told = f"requests, {self._num_failed} failed" if self._num_failed else "requests"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], advance=1, description=told)
        elif self._show_bar and (now := time.monotonic()) - self._told_at >= LINE_S:
            self._told_at = now
            self.say(
                f"{self._num_done} of {self._num_requests} {told}, {now - self._began_at:.0f} s"
            )

    def end(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.stop()
