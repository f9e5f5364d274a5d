"""What the server uses of the engine. `tetrad.engine.client.EngineClient` is one; tests bring
their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol

from tetrad.core.errors import EngineDiedError
from tetrad.core.messages import EngineStats, LogSettings, Reply
from tetrad.core.request import Request, RequestOutput
from tetrad.engine.sinks import Sink


class EnginePort(Protocol):
    """A started engine."""

    @property
    def info(self) -> dict[str, Any]:
        """What the engine resolved and chose, for /server_info. Read here:

        context_length        longest prompt and answer together, in tokens
        max_total_tokens      tokens the cache holds
        max_running_requests  sequences in one step
        memory                weight_bytes, cache_bytes, free_bytes
        graph_bytes           memory that recorded decode steps took
        graph_sizes           set of recorded decode steps → their sizes, or None
        weights               stored format → memory_bytes
        load_s, read_gb_per_s seconds from files to weights in place, and the rate of reading
        device, dtype         what it runs on
        kv_cache_dtype        type of cached keys
        cache_sentence        the cache's size and what limits it
        memory_statement      sentences: who has the memory, what binds, what more would buy
        backends              op, backend, reason, refusals of each op
        """

    @property
    def stats(self) -> EngineStats:
        """The last reading it sent."""

    @property
    def last_beat_age_s(self) -> float:
        """Seconds since it was last heard of; it speaks at least once a second."""

    @property
    def step_age_s(self) -> float:
        """How long its current step had been running when it was last heard of."""

    @property
    def died(self) -> asyncio.Future[EngineDiedError]:
        """Done when it ended unasked."""

    def begin(self, request: Request, sink: Sink) -> Callable[[], None]:
        """Serve a request; `sink` hears what it gets, or why it gets nothing. Returns what is to be
        called when nobody wants more of it, which aborts it unless it is over."""

    def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request, up to the one with `finish`. Closing it early aborts the request.

        Raises RequestError before the first output, EngineDiedError at any time.
        """

    async def flush_cache(self) -> tuple[bool, str]:
        """Empty the prefix cache; False with the reason while anything runs or waits."""

    on_log_settings: Callable[[LogSettings], None] | None
    """Hears what any API process was told to log."""

    async def ask(self, name: str, **arguments: Any) -> Reply:
        """An operator's order, see `engine/calls.py`. Raises EngineDiedError."""

    async def state(self) -> dict[str, Any]:
        """Stats read now, and whether the cache's books balance."""

    async def stop(self) -> None:
        """End it; open requests get an error."""


class StartedEngine(EnginePort, Protocol):
    """What the API process that started it may do besides."""

    async def end_stuck(self) -> None:
        """Have it tell on stderr where each of its threads is, and kill it."""

    def add_worker(self, worker: int) -> str:
        """Have it speak to one more API process, by a number never given before; returns the folder
        of the sockets. Raises EngineDiedError."""

    def remove_worker(self, worker: int) -> None:
        """That process is gone: abort its requests. Raises EngineDiedError."""
