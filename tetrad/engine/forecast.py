"""How many pages the running requests will need at their peak, asked before another is admitted.

A request may set a length limit far above what it uses. How much of their limits the latest
finished requests used tells how long another will get: as long, on average, as those of them that
got longer than it is now. (SGLang's `new_token_ratio` is their mean for all.) A request that only
its limit can end is expected to reach it.

The peak is searched for at each moment at which a request is expected to end: until then the
remaining ones have grown, and those that ended have returned their pages.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tetrad.core.plan import Ints
from tetrad.core.step import PAGE_TOKENS
from tetrad.engine.running import Running
from tetrad.engine.sequence import Sequence

FIRST_SHARES = (0.4, 0.4, 1.0, 1.0)
"""What is believed before any has finished; SGLang begins with the same mean, 0.7."""
MOST_SHARES = 128
"""Finished requests that are remembered."""
AT_PEAK = 0.5
"""Of what one is expected to get, what it has when all together are largest: of many whose ends are
not known some end early, and others come in their place. Simulated, see docs/log.md."""
STEP_UP = 0.1
"""When pages ran out more is expected, by this share of what is left to the limit."""
STEP_DOWN = 0.98
"""It fades with each request that finishes."""
Floats = npt.NDArray[np.float64]
HALF_PAGE = PAGE_TOKENS // 2
"""Of each last page as much is empty on average."""


class Growth(NamedTuple):
    """One sequence that holds pages, or is about to."""

    remaining: int
    """Tokens that it is expected to get yet."""
    tokens: int
    """Known and pending ones."""
    pages: int
    """That it holds."""
    own_pages: int
    """Those among them that nobody had before, which are free when it ends."""


class Forecast:
    """Learns from those that finish and those that are set back. `conservativeness` scales what is
    expected; 0 expects nothing."""

    def __init__(self, conservativeness: float = 1.0) -> None:
        self._conservativeness = conservativeness
        self._shares = deque(FIRST_SHARES, MOST_SHARES)
        self._sorted: list[float] = []
        self._sums: list[float] = []
        self._step_up = 0.0

    @property
    def share(self) -> float:
        """Mean of what finished requests used of what they asked for."""
        return sum(self._shares) / len(self._shares)

    def finished(self, sequence: Sequence) -> None:
        """Take in what one used. One that could only end at its limit teaches nothing."""
        if sequence.asked:
            self._shares.append(min(1.0, sequence.num_generated / sequence.asked))
            self._sorted = []
            self._step_up *= STEP_DOWN

    def set_back(self) -> None:
        """The pages did not suffice: expect more from now on."""
        self._step_up = min(1.0, self._step_up + STEP_UP)

    def remaining(self, sequence: Sequence) -> int:
        """Tokens that a sequence is expected to get yet."""
        total = sequence.num_total
        most = max(0, sequence.most_tokens - total)
        expected: float = most
        if asked := sequence.asked:
            so_far = total - sequence.num_prompt
            left = max(0, asked - so_far)
            mean = asked * self._share_beyond(so_far / asked)
            expected = AT_PEAK * max(0.0, mean - so_far)
            expected += self._step_up * (left - expected)
        return min(most, math.ceil(self._conservativeness * expected))

    def _share_beyond(self, share: float) -> float:
        """Mean of those that went beyond `share`; 1 where none did."""
        self._sort()
        first = bisect_right(self._sorted, share)
        count = len(self._sorted) - first
        return (self._sums[-1] - self._sums[first]) / count if count else 1.0

    def _sort(self) -> None:
        if not self._sorted:
            self._sorted = sorted(self._shares)
            self._sums = list(accumulate(self._sorted, initial=0.0))

    def growth(self, sequence: Sequence, found: int | None = None) -> Growth:
        """Of a sequence that runs, or of one that would share `found` pages if it did."""
        pages, shared = len(sequence.pages), sequence.num_shared
        if found is not None:
            pages = shared = found
        return Growth(self.remaining(sequence), sequence.num_total, pages, pages - shared)

    def growths(self, running: Running) -> Ints:
        """[4, n]: `growth` of each that runs, as columns."""
        rows, order = running.rows, running.order
        tokens = rows.total.take(order)
        most = np.maximum(rows.most_tokens.take(order) - tokens, 0)
        asked = rows.asked.take(order)
        pages = rows.num_pages.take(order)
        so_far = tokens - rows.num_prompt.take(order)
        expected = np.where(asked > 0, self._expected(np.maximum(asked, 1), so_far), most)
        remaining = np.minimum(most, np.ceil(self._conservativeness * expected).astype(np.int64))
        return np.stack([remaining, tokens, pages, pages - rows.num_shared.take(order)])

    def _expected(self, asked: Ints, so_far: Ints) -> Floats:
        """Tokens yet to come, on average, of sequences that end tokens may end."""
        self._sort()
        first = np.searchsorted(self._sorted, so_far / asked, side="right")
        count = len(self._sorted) - first
        beyond = (self._sums[-1] - np.take(self._sums, first)) / np.maximum(count, 1)
        mean = asked * np.where(count > 0, beyond, 1.0)
        expected: Floats = AT_PEAK * np.maximum(mean - so_far, 0.0)
        expected += self._step_up * (np.maximum(asked - so_far, 0) - expected)
        return expected


def peak_pages(growths: Ints) -> int:
    """Most pages that they [4, n] will need together beyond those that they hold now."""
    remaining, tokens, pages, own_pages = growths[:, np.argsort(-growths[0], kind="stable")]
    # up to each all have grown as far as this one will, and the others have ended
    grown = tokens.cumsum() + np.arange(1, len(tokens) + 1) * (remaining + HALF_PAGE)
    given_back = own_pages.sum() - own_pages.cumsum()
    return max(0, int((grown // PAGE_TOKENS - pages.cumsum() - given_back).max()))


class Outlook:
    """What those that run will need together, for several newcomers one after another."""

    def __init__(self, forecast: Forecast, running: Running) -> None:
        self._growth = forecast.growth
        self._growths = forecast.growths(running)
        self._newcomers: list[Growth] = []
        self._most = int(most_tokens(self._growths).sum())

    def add(self, sequence: Sequence) -> None:
        """One more runs."""
        growth = self._growth(sequence)
        self._newcomers.append(growth)
        self._most += int(most_tokens(growth))

    def has_room_for(self, newcomer: Sequence, num_found: int, num_free: int) -> bool:
        """With one that would share `num_found` pages, will at most `num_free` be needed beyond
        those that all hold now?

        The peak is found by sorting all; but where there is room even if each reaches its own
        largest size at the same moment, as nearly always, nobody needs to look for it.
        """
        growth = self._growth(newcomer, num_found)
        if self._most + int(most_tokens(growth)) <= num_free * PAGE_TOKENS:
            return True
        newcomers = np.array([*self._newcomers, growth]).T
        return peak_pages(np.concatenate([self._growths, newcomers], axis=1)) <= num_free


def most_tokens(growths: Ints | Growth) -> Ints:
    """[4, ...] → [...]: what each takes at its end beyond what it holds, in tokens, as `peak_pages`
    counts them."""
    remaining, tokens, pages, _ = growths
    most: Ints = np.maximum(tokens + remaining + HALF_PAGE - pages * PAGE_TOKENS, 0)
    return most
