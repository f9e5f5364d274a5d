"""Who receives a request's outputs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from msgspec import structs

from tetrad.core.errors import TetradError
from tetrad.core.request import RequestOutput


class Sink(Protocol):
    """Hears what one request gets, at once and in order, within the event loop's turn: it must be
    quick, and raises nothing."""

    def take(self, output: RequestOutput) -> None:
        """An output that tells more than a token; the one with `finish` is the last."""

    def take_tokens(self, token_ids: Sequence[int]) -> None:
        """Tokens, often one. All else is as the last output told."""

    def fail(self, error: TetradError) -> None:
        """Nothing more will come: RequestError if the engine refused the request, EngineDiedError
        if it died."""


class Stream:
    """What one request gets."""

    __slots__ = ("due", "due_more", "is_over", "name", "number", "sink")

    def __init__(self, number: int, name: str, sink: Sink) -> None:
        """`sink` hears it."""
        self.number = number
        self.name = name
        """Of the request in the engine."""
        self.sink = sink
        self.due: list[int] = []
        """Tokens that have come and were not handed out yet."""
        self.due_more: deque[tuple[list[int], RequestOutput]] = deque()
        """Other outputs, each with the tokens before it; all before `due`."""
        self.is_over = False

    def add(self, output: RequestOutput) -> None:
        """Note an output to hand out."""
        self.due_more.append((self.due, output))
        self.due = []

    def hand_out(self) -> None:
        """Tell the sink the next output that has come, or the tokens behind the last: either may
        be long work."""
        if self.due_more:
            tokens, output = self.due_more.popleft()
            if tokens:
                self.sink.take_tokens(tokens)
            self.is_over = output.finish is not None
            self.sink.take(output)
        elif self.due:
            due, self.due = self.due, []
            self.sink.take_tokens(due)

    def leave(self) -> None:
        """Nobody hears it any more."""
        self.due = []
        self.due_more.clear()

    def fail(self, error: TetradError) -> None:
        """Tell it that nothing more will come, after all that has."""
        while self.due_more or self.due:
            self.hand_out()
        self.is_over = True
        self.sink.fail(error)


class Outputs:
    """A sink that is read as an iterator."""

    def __init__(self, rid: str) -> None:
        """`rid`: as the reader knows it."""
        self._rid = rid
        self._told: RequestOutput | None = None
        self._items: asyncio.Queue[RequestOutput | TetradError] = asyncio.Queue()

    def take(self, output: RequestOutput) -> None:
        """An output that tells more than a token."""
        self._told = structs.replace(output, rid=self._rid)
        self._items.put_nowait(self._told)

    def take_tokens(self, token_ids: Sequence[int]) -> None:
        """Tokens."""
        assert self._told is not None
        for token_id in token_ids:
            output = structs.replace(self._told, token_ids=(token_id,), logprobs=(), queue_s=0.0)
            self._items.put_nowait(output)

    def fail(self, error: TetradError) -> None:
        """Nothing more will come."""
        self._items.put_nowait(error)

    async def read(self) -> AsyncGenerator[RequestOutput, None]:
        """Up to the output that carries `finish`. Raises what the request failed with."""
        is_over = False
        while not is_over:
            item = await self._items.get()
            if isinstance(item, TetradError):
                raise item
            is_over = item.finish is not None
            yield item
