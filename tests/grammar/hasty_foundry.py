"""A grammar process with little patience, whose followers do what tokens of the tests ask for."""

from __future__ import annotations

import os
import signal
import sys
import time

import xgrammar

from tetrad.grammar import compiling, foundry
from tetrad.grammar.following import Followers

SPINS, CRASHES, SLEEPS = 513, 514, 515
"""Ids without a token, after which the follower never comes back, ends the process, or does nothing
for a while."""

LARGE_BYTES = 100_000
"""A grammar of more takes long to read."""

compiling.CPU_LIMIT_S = 1.0


class WilfulFollowers(Followers):
    def _load(self, descriptor: int) -> xgrammar.CompiledGrammar:
        if os.fstat(descriptor).st_size > LARGE_BYTES:
            time.sleep(0.3)
        return super()._load(descriptor)

    def _fill(self, row: int, number: int, token_ids: list[int]) -> int:
        self._work_for(number)
        while SPINS in token_ids:
            pass
        if CRASHES in token_ids:
            os.kill(os.getpid(), signal.SIGSEGV)
        if SLEEPS in token_ids:
            time.sleep(0.3)
        return super()._fill(row, number, [i for i in token_ids if i != SLEEPS])


if __name__ == "__main__":
    from tetrad.grammar import following

    following.Followers = WilfulFollowers  # type: ignore[misc]
    sys.exit(foundry.main())
