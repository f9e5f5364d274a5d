"""Long work takes turns, so that the event loop stays free for whoever asks something small.

An event may be megabytes, an answer a hundred, and reading a body may take as long as a step. Each
is a piece of work that nobody can interrupt, and several that are due in one pass of the event loop
would be one long piece. So all that is rendered, encoded or read goes through here: in each pass
there is time for `SHARE_S`. What comes later stands in line, first come first served, until some
passes have gone by without any, as many as a request for /health takes from its connection to its
answer. It therefore waits for one piece, not for one in each of its passes.

Python that a thread runs holds the interpreter for 5 ms at a time, several threads for as long
each: so they take turns, too.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

SHARE_S = 0.005
"""What is begun in one pass of the event loop, but for the end of the last piece."""
FREE_PASSES = 8
"""Without any, once the share was spent."""


class Pace:
    """Of one event loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._line: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._left_s = SHARE_S
        self._num_free = 0
        """Passes without work since the share was spent."""
        self._is_counting = False
        """Whether the next pass will be noticed."""

    async def take(self, work: Callable[[], T]) -> T:
        """What `work` returns: at once if there is time and nobody stands in line. Not called if
        the task is cancelled before its turn."""
        if self._left_s > 0 and not self._line:
            return self._timed(work)
        waiter: asyncio.Future[T] = self._loop.create_future()
        self._line.append((partial(contextvars.copy_context().run, work), waiter))
        return await waiter

    def take_later(self, work: Callable[[], object]) -> None:
        """Call `work`, whether or not anybody waits for it: at once if there is time."""
        if self._left_s > 0 and not self._line:
            self._timed(work)
        else:
            self._line.append((work, self._loop.create_future()))

    def _timed(self, work: Callable[[], T]) -> T:
        began_at = self._clock()
        try:
            return work()
        finally:
            self._left_s -= self._clock() - began_at
            self._count()

    def _count(self) -> None:
        if not self._is_counting:
            self._is_counting = True
            self._loop.call_soon(self._pass)

    def _pass(self) -> None:
        self._is_counting = False
        if self._left_s <= 0 and self._num_free < FREE_PASSES:
            self._num_free += 1
            self._count()
            return
        self._left_s, self._num_free = SHARE_S, 0
        while self._line and self._left_s > 0:
            work, waiter = self._line.popleft()
            if not waiter.done():
                self._serve(work, waiter)

    def _serve(self, work: Callable[[], Any], waiter: asyncio.Future[Any]) -> None:
        try:
            result = self._timed(work)
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            waiter.set_exception(error)
        else:
            waiter.set_result(result)


_PACES: WeakKeyDictionary[asyncio.AbstractEventLoop, Pace] = WeakKeyDictionary()
_BESIDE = ThreadPoolExecutor(1, "beside")


def _pace() -> Pace:
    loop = asyncio.get_running_loop()
    if (pace := _PACES.get(loop)) is None:
        pace = _PACES[loop] = Pace(loop)
    return pace


async def in_turn(work: Callable[[], T]) -> T:
    """What `work` returns, which may take long, in its turn."""
    return await _pace().take(work)


def in_turn_later(work: Callable[[], object]) -> None:
    """Call `work`, which may take long, in its turn, if that is not now."""
    _pace().take_later(work)


async def beside(work: Callable[[], T]) -> T:
    """What `work` returns, which is Python, in the one thread that runs some beside the loop."""
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(_BESIDE, context.run, work)
