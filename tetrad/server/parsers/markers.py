"""Looking for markers such as <think> in text that arrives in pieces.

A marker is a fixed string whose first character is its only "<".
"""

from __future__ import annotations

from collections.abc import Sequence


def held_suffix(text: str, markers: Sequence[str]) -> int:
    """Length of the end of `text` that could grow into one of `markers`, 0 if none could.

    Callers look for complete markers first.
    """
    at = text.rfind("<")
    if at < 0:
        return 0
    tail = text[at:]
    return len(tail) if any(marker.startswith(tail) for marker in markers) else 0


def first_marker(text: str, markers: Sequence[str], start: int = 0) -> tuple[int, str] | None:
    """Position and name of the marker that begins first in `text[start:]`, None without any."""
    found = [(at, marker) for marker in markers if (at := text.find(marker, start)) >= 0]
    return min(found) if found else None
