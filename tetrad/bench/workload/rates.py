"""A rate that changes over time: steps and ramps."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

NUMBER = r"\d+(?:\.\d+)?"
PIECE = re.compile(rf"(?P<first>{NUMBER})(-(?P<last>{NUMBER}))?:(?P<seconds>{NUMBER})")


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of time over which the rate goes evenly from `first` to `last` (per second)."""

    first: float
    last: float
    seconds: float

    @property
    def num_requests(self) -> float:
        """Requests due within it."""
        return (self.first + self.last) / 2 * self.seconds

    def when(self, num_requests: float) -> float:
        """Seconds from its beginning until so many have been due, at most `num_requests`."""
        slope = (self.last - self.first) / self.seconds
        root = math.sqrt(max(0.0, self.first**2 + 2 * slope * num_requests))
        return 2 * num_requests / (self.first + root) if num_requests else 0.0


def parse_profile(words: Sequence[str]) -> list[Piece]:
    """RATE:SECONDS and FROM-TO:SECONDS. Raises ValueError that names the word."""
    pieces = []
    for word in words:
        match = PIECE.fullmatch(word)
        if match is None:
            raise ValueError(
                f"{word!r} is no piece of a rate profile; write 5:30 for 5 requests per second "
                "over 30 seconds, or 5-20:60 for a ramp"
            )
        first = float(match["first"])
        piece = Piece(first, float(match["last"] or first), float(match["seconds"]))
        if piece.seconds <= 0 or piece.num_requests <= 0:
            raise ValueError(f"no request is due within {word!r}; rate and seconds must be above 0")
        pieces.append(piece)
    if pieces and pieces[-1].last == 0:
        raise ValueError(f"the last rate of {words[-1]!r} holds on, so it must be above 0")
    return pieces


def covered(pieces: Sequence[Piece]) -> int:
    """How many requests are due from the beginning of a profile to its end, the one at 0 too."""
    return 1 + math.floor(sum(piece.num_requests for piece in pieces) + 1e-9)


def when(pieces: Sequence[Piece], place: float) -> float:
    """Seconds after the start at which `place` requests have been due; the last rate holds on."""
    start_s = 0.0
    for piece in pieces:
        if place <= piece.num_requests:
            return start_s + min(piece.when(place), piece.seconds)
        place -= piece.num_requests
        start_s += piece.seconds
    return start_s + place / pieces[-1].last
