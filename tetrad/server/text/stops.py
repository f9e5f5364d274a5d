"""Stop strings in a text that arrives in pieces.

What could still become a stop string is held back, so nothing of a stop string is ever shown, and
the result does not depend on how the text was cut: the match that ends first wins, and of several
that end together the longest. Each string is followed by a Knuth-Morris-Pratt automaton, so a
character costs the same however long the strings and however often they almost match.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Feed text, get what may be shown. `matched` is the stop string once one was found."""

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        """`stops`: non-empty strings. With `keep` the one that matched is shown, too."""
        self._keep = keep
        self._automata = [_Automaton(stop) for stop in stops]
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Return what `text` makes certain to be shown; nothing more once `matched` is set."""
        if not self._automata:
            return text
        for position, character in enumerate(text):
            ended = [a.pattern for a in self._automata if a.advance(character)]
            if ended:
                self.matched = max(ended, key=len)
                seen = self._held + text[: position + 1]
                self._held = ""
                return seen if self._keep else seen[: len(seen) - len(self.matched)]
        return self._release(self._held + text)

    def _release(self, seen: str) -> str:
        cut = len(seen) - max(a.state for a in self._automata)
        self._held = seen[cut:]
        return seen[:cut]

    def flush(self) -> str:
        """The text ended without a match: return what was held back."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """How much of `pattern` the text read so far ends with."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.state = 0
        self._borders = _borders(pattern)

    def advance(self, character: str) -> bool:
        """Read one character; True when the pattern is complete."""
        while self.state and self.pattern[self.state] != character:
            self.state = self._borders[self.state - 1]
        if self.pattern[self.state] == character:
            self.state += 1
        return self.state == len(self.pattern)


def _borders(pattern: str) -> list[int]:
    """Longest proper prefix of pattern[:i+1] that is also its suffix, for each i."""
    borders = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = borders[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        borders[i] = length
    return borders
