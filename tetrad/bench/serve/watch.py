"""Whoever looks on while a server is measured."""

from __future__ import annotations

from typing import Protocol


class Watch(Protocol):
    """Whoever looks on: the command line's progress bar, or nobody in a test."""

    def say(self, line: str) -> None:
        """One line about what happens next."""

    def say_once(self, line: str) -> None:
        """The same of what is so for one run after the other, unless it was said already."""

    def begin(self, num_requests: int) -> None:
        """The measured load starts."""

    def finished(self, has_failed: bool) -> None:
        """A request has ended; `has_failed` covers only what is known before its answer is read."""

    def end(self) -> None:
        """The measured load is over, or was cut off."""
