"""When streams get their tokens: in turns of the event loop, which has other work to do."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from tetrad.core.request import RequestOutput
from tetrad.engine.sinks import Stream

TURN_S = 0.002
"""How long one turn of the event loop hands out what the engine gave. Who else waits for the loop,
a new connection or whoever asks for /health, does not wait for thousands of streams."""
MUCH_DUE = 1024
"""Outputs that tell more than a token, which take more memory than a message of them."""
MOST_REST_S = 0.005
"""Once all that is due is handed out, tokens rest for as long as that took, but no longer than
this; what comes meanwhile is written together. So they leave half of a core to others, also where a
step is shorter than it takes to write what it gives. Where it is twice as long, nobody waits."""


class Turns:
    """Who got something, and is told in its turn. Belongs to the event loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._due: deque[Stream] = deque()
        """Those that got tokens; one whose turn has come before has nothing left."""
        self._due_first: deque[Stream] = deque()
        """Those that got more than tokens: who begins is not to wait for all that run, nor rest."""
        self._is_next = False
        """Whether the next turn of the event loop goes on."""
        self._timer: asyncio.TimerHandle | None = None
        self._spent_s = 0.0
        """On what is due, since the last rest."""
        self._rests_until = 0.0

    @property
    def is_behind(self) -> bool:
        """Whether so much is due that more may wait."""
        return len(self._due_first) > MUCH_DUE

    def token(self, stream: Stream, token_id: int) -> None:
        """It got a token, of which nothing else is new."""
        if not stream.due:
            self._due.append(stream)
        stream.due.append(token_id)

    def output(self, stream: Stream, output: RequestOutput) -> None:
        """It got more."""
        self._due_first.append(stream)
        stream.add(output)

    def go(self) -> None:
        """Hand out what may go now, if not the next turn of the event loop does."""
        if not self._is_next:
            self._turn()

    def _turn(self) -> None:
        due, due_first, began_at = self._due, self._due_first, self._clock()
        now, self._is_next, has_due = began_at, False, bool(due)
        while due_first or (due and now >= self._rests_until):
            if now > began_at + TURN_S:
                self._is_next = True
                self._loop.call_soon(self._turn)
                break
            (due_first or due).popleft().hand_out()
            now = self._clock()
        self._spent_s += now - began_at
        if has_due and not due:
            self._rests_until = now + min(self._spent_s, MOST_REST_S)
            self._spent_s = 0.0
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        elif due and not self._is_next and self._timer is None:
            self._timer = self._loop.call_later(self._rests_until - now, self._has_rested)

    def _has_rested(self) -> None:
        self._timer, self._rests_until = None, 0.0
        self.go()
