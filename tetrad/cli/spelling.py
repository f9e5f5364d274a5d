"""Which flag was meant by one that is none: a misspelt or a shortened one, no mere likeness."""

from __future__ import annotations

from collections.abc import Iterable

MOST_EDITS = 2
MAX_FLAG_CHARACTERS = 100
"""No flag is longer; comparing takes time with the square."""


def meant(flag: str, known: Iterable[str]) -> str | None:
    """The one of `known` whose spelling is at most `MOST_EDITS` letters away (of short ones
    fewer), else the only one `flag` begins in order (`--random-in-len`), else the only one that
    ends with it (`--concurrency`); None when there is no such flag."""
    if len(flag) > MAX_FLAG_CHARACTERS:
        return None
    names = sorted(set(known))
    near = min(names, key=lambda name: edits(flag, name), default=None)
    if near is not None and edits(flag, near) <= min(MOST_EDITS, len(flag) // 3):
        return near
    longer = [name for name in names if _shortens(flag, name)]
    longer = longer or [name for name in names if flag[1:] and name.endswith(flag[1:])]
    return longer[0] if len(longer) == 1 else None


def edits(one: str, other: str) -> int:
    """Letters to insert, delete or replace to get from `one` to `other`."""
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        before, row[0] = row[0], i
        for j, wanted in enumerate(other, 1):
            change = before + (letter != wanted)
            before, row[j] = row[j], min(change, row[j] + 1, row[j - 1] + 1)
    return row[-1]


def _shortens(flag: str, name: str) -> bool:
    short, words = flag.split("-"), name.split("-")
    return len(short) <= len(words) and all(
        word.startswith(part) for part, word in zip(short, words, strict=False)
    )
