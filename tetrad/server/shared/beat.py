"""The beat of each API process, and what its absence means.

A process whose event loop turns says so in the table that all share. The first one ends another
that has stopped. The others look at the first: whoever is asked for health says that it is silent,
and when it has stopped they end the server, which only a service manager can start anew.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from tetrad.core.config import ServeConfig
from tetrad.server.shared.tally import BEAT_AT, IS_SERVING, LOST_STARTS, Tally

BEAT_S = 0.5
SILENCE_LIMIT_S = 10.0
"""An engine or a first process not heard of for this long is unhealthy."""
STOPPED_S = 20.0
"""One whose event loop has not turned for so long serves nobody any more."""
MOST_LOST_STARTS = 3
"""So many starts of a process come to nothing before the server says that it is unwell."""


async def beat(tally: Tally) -> None:
    """Beat until cancelled."""
    while True:
        tally.put(BEAT_AT, time.monotonic())
        await asyncio.sleep(BEAT_S)


def stopped_s(config: ServeConfig) -> float:
    """After how many seconds a process that does not move is ended."""
    return min(STOPPED_S, config.watchdog_timeout)


def why_unwell(tally: Tally) -> str | None:
    """What is wrong with other API processes of the server, in a clause; None if nothing is."""
    beats, lost = tally.each(BEAT_AT), tally.each(LOST_STARTS)
    age_s = time.monotonic() - beats[0]
    if beats[0] and age_s > SILENCE_LIMIT_S:
        return f"API process 0 has been silent for {age_s:.0f} s"
    for number, is_serving in enumerate(tally.each(IS_SERVING)):
        if lost[number] >= MOST_LOST_STARTS and not is_serving:
            return (
                f"API process {number} could not be started {lost[number]:.0f} times in a row; "
                "the others serve, and the log says why"
            )
    return None


class Watch:
    """Who has stopped, judged by how many looks a beat outlasts.

    Looks and not seconds: when the machine or the watcher itself was suspended, all beats are old,
    and nobody is at fault.
    """

    def __init__(self, tally: Tally, limit_s: float) -> None:
        self._tally = tally
        self._most_looks = max(1, round(limit_s / BEAT_S))
        self._seen: dict[int, tuple[float, int]] = {}
        """By process: its last beat, and how many looks found no newer one."""

    def look(self, numbers: Iterable[int]) -> list[int]:
        """Those of `numbers` that take connections and have stopped; to be called every BEAT_S."""
        beats, serving = self._tally.each(BEAT_AT), self._tally.each(IS_SERVING)
        stopped = []
        for number in numbers:
            last, num_looks = self._seen.get(number, (0.0, 0))
            same = serving[number] and beats[number] == last
            num_looks = num_looks + 1 if same else 0
            self._seen[number] = (beats[number], num_looks)
            if num_looks >= self._most_looks:
                stopped.append(number)
        return stopped
