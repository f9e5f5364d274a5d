"""What the engine gives an answer's choices, as it comes.

Each choice has a reader, which the engine's end calls for every output. What it read goes to the
task that answers the request, through the answer's inbox. But a task that waits for nothing else
has nothing to add: then the bytes of an event go to the connection from within the same call, and
no task is woken. There are thousands a step.

    engine's message → ChoiceReader → Session → Delta ─┬→ Outlet → transport
                                                       └→ Inbox → task → ASGI → transport

Both ways give the same bytes in the same order. The short one is open while the answer has begun,
the task has sent all it had, and the client reads.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tetrad.core.errors import TetradError
from tetrad.core.request import RequestOutput
from tetrad.server.door.gate import Admission
from tetrad.server.stream.session import Delta, Session
from tetrad.server.telemetry.metrics import RequestWatch
from tetrad.server.wire.pace import SHARE_S, in_turn

BODY = "tetrad.body"
"""Where in the state of its scope a request finds the outlet of its connection, if there is one."""

MOST_BYTES = 65536
"""Written together, but for the last event of them: as much as a transport holds before it asks for
patience."""
MOST_AT_ONCE = 64
"""Items that are written together."""


class Outlet(Protocol):
    """Takes pieces of the body of one answer, past the application: `http.connections.Body`."""

    @property
    def is_open(self) -> bool:
        """Whether it can take a piece now."""

    def write(self, piece: bytes) -> None:
        """Take one that is not empty."""


Render = Callable[[int, Delta], bytes]
Texts = Callable[[int], Callable[[str], bytes] | None]
Renderer = tuple[Render, Texts]
"""`render` and `text` of a ShortWay."""


def no_texts(_index: int) -> None:
    """There are none."""


@dataclass(frozen=True, slots=True)
class ShortWay:
    """From the readers of an answer to its client."""

    render: Render
    """Makes events of what a step added to the choice of an index; empty if that is nothing to
    tell."""
    outlet: Outlet
    text: Texts = no_texts
    """What does the same for a choice to which text is added and nothing else, if it may be used
    now."""


class Inbox:
    """What the task that answers a request is to see, in order.

    What is there already, for a client that was slow or has left, comes without any real waiting:
    so whoever reads it works on it in its turn (`pace`), or nobody else would have one before the
    last of it, not even the news that the client has left.
    """

    def __init__(self) -> None:
        self._items: deque[tuple[int, Delta] | Exception] = deque()
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_waited_for(self) -> bool:
        """Whether the task has seen everything and waits for more."""
        return self._waiter is not None

    def put(self, item: tuple[int, Delta] | Exception) -> None:
        """Add an item, which may be an error to raise."""
        self._items.append(item)
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
            self._waiter = None

    async def get(self) -> list[tuple[int, Delta]]:
        """The next items, as many as are there. Raises the first if it is an error."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items = self._items
        found: list[tuple[int, Delta]] = []
        while items and len(found) < MOST_AT_ONCE:
            item = items[0]
            if isinstance(item, Exception):
                if not found:
                    raise item
                break
            found.append(item)
            items.popleft()
        return found


async def together(
    render: Render, deltas: Sequence[tuple[int, Delta]]
) -> AsyncGenerator[bytes, None]:
    """Their events, which are written together unless they are long, or take long to make: then
    others have a turn in between."""
    rest = iter(deltas)

    def some() -> tuple[bytes, bool]:
        piece, began_at = b"", time.monotonic()
        for index, delta in rest:
            piece += render(index, delta)
            if len(piece) >= MOST_BYTES or time.monotonic() - began_at > SHARE_S:
                return piece, True
        return piece, False

    has_more = True
    while has_more:
        piece, has_more = await in_turn(some)
        if piece:
            yield piece


class ChoiceReader:
    """Reads what the engine gives one choice: a `Sink`."""

    def __init__(
        self,
        session: Session,
        index: int,
        watch: RequestWatch,
        admission: Admission,
        inbox: Inbox,
        short_way: ShortWay | None = None,
    ) -> None:
        """`index`: of the choice in its answer."""
        self._session = session
        self._index = index
        self._watch = watch
        self._admission = admission
        self._inbox = inbox
        self._short_way = short_way
        self._has_begun = self._is_over = False

    def take(self, output: RequestOutput) -> None:
        """An output that tells more than a token."""
        if self._is_over:
            return
        try:
            if self._session.completion_tokens == 0:
                if output.token_ids:
                    self._watch.first_token(self._index, output)
                self._admission.first_token(self._index)
            self._tell((self._session.feed(output),))
        except Exception as error:  # noqa: BLE001 - raised again by the task
            self._end(error)

    def take_tokens(self, token_ids: Sequence[int]) -> None:
        """Tokens; their events are written together."""
        if self._is_over:
            return
        session = self._session
        try:
            if session.is_plain and (way := self._open_way) and (say := way.text(self._index)):
                piece = b""
                for token_id in token_ids:
                    if text := session.plain_text(token_id):
                        piece += say(text)
                if piece:
                    way.outlet.write(piece)
            else:
                self._tell(map(session.feed_token, token_ids))
        except Exception as error:  # noqa: BLE001 - raised again by the task
            self._end(error)

    def close(self) -> None:
        """Nobody wants more: what comes before the engine knows is not counted, either."""
        self._is_over = True

    def fail(self, error: TetradError) -> None:
        """Nothing more will come."""
        if not self._is_over:
            self._end(error)

    def _end(self, error: Exception) -> None:
        if not self._is_over:
            self._is_over = True
            self._watch.failed(error)
        self._inbox.put(error)

    @property
    def _open_way(self) -> ShortWay | None:
        """The first piece of a choice is always the task's to see."""
        if self._has_begun and self._inbox.is_waited_for:
            way = self._short_way
            return way if way is not None and way.outlet.is_open else None
        return None

    def _tell(self, deltas: Iterable[Delta]) -> None:
        """Up to the last, which is the task's to see, too. So is what comes behind much."""
        way, pieces, num_bytes = self._open_way, [], 0
        for delta in deltas:
            if way is not None and delta.finish is None and num_bytes < MOST_BYTES:
                pieces.append(way.render(self._index, delta))
                num_bytes += len(pieces[-1])
                continue
            self._has_begun = True
            self._inbox.put((self._index, delta))
            if delta.finish is not None:
                self._is_over = True
                num_tokens = self._session.completion_tokens
                self._watch.last_token(self._index, num_tokens, delta.finish.reason)
                break
        if way is not None and (piece := b"".join(pieces)):
            way.outlet.write(piece)
