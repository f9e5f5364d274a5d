"""The memory that engine and followers share, and what is said of its rows.

A few words of header, then a row for each answer of a step: bit v % 32 of word v // 32 is 1 if
token v is allowed next.
"""

from __future__ import annotations

HEADER_WORDS = 16
"""Word 0: the answer that is being worked for, or NOBODY. Word 1: counts up."""
WORD_BYTES = 4
NOBODY = -1

ALLOWED, DEAD_END, REJECTED, GIVEN_UP, ENDED = range(5)
"""What became of a row: filled; no token is allowed; the grammar did not allow what it got; it took
too long; the process ended, and again when it was tried anew."""


JSON_KIND = "json_schema"
"""Kind of grammar whose texts are JSON from end to end."""


def mask_words(vocab: int) -> int:
    """Words of a row."""
    return (vocab + 31) // 32
