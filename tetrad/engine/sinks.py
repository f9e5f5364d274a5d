"""Who hears what a request gets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Protocol

from msgspec import structs

from tetrad.core.errors import TetradError
from tetrad.core.request import RequestOutput


class Sink(Protocol):
    """Hears what one request gets, at once and in order, within the event loop's turn: it must be
    quick, and raises nothing."""

    def take(self, output: RequestOutput) -> None:
        """An output that tells more than a token; the one with `finish` is the last."""

    def take_token(self, token_id: int) -> None:
        """A token. All else is as the last output told."""

    def fail(self, error: TetradError) -> None:
        """Nothing more will come: RequestError if the engine refused the request, EngineDiedError
        if it died."""


class Stream:
    """What one request gets."""

    __slots__ = ("due", "is_over", "name", "number", "sink")

    def __init__(self, number: int, name: str, sink: Sink) -> None:
        """`sink` hears it."""
        self.number = number
        self.name = name
        """Of the request in the engine."""
        self.sink = sink
        self.due: list[int | RequestOutput] = []
        """What has come and was not handed out yet."""
        self.is_over = False

    def hand_out(self) -> None:
        """Tell the sink what has come."""
        due, self.due = self.due, []
        for item in due:
            if isinstance(item, int):
                self.sink.take_token(item)
            else:
                self.is_over = item.finish is not None
                self.sink.take(item)

    def fail(self, error: TetradError) -> None:
        """Tell it that nothing more will come, after all that has."""
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

    def take_token(self, token_id: int) -> None:
        """A token."""
        assert self._told is not None
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
