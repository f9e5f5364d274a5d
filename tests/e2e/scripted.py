"""Streams of the engine without a model: what each must get is known before it is asked for."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import aiohttp

from tetrad.core.presets import served_shapes
from tetrad.data import embedded_model
from tetrad.engine.null import scripted_token

NULL = ("--load-format", "null", "--null-step-ms", "5")
SHAPES = served_shapes(embedded_model(), "null")


def expected(seed: int, num_tokens: int) -> list[int]:
    """The output ids of a request of that seed."""
    eos = frozenset(SHAPES.eos_ids)
    return [scripted_token(seed, place, SHAPES.vocab, eos) for place in range(num_tokens)]


class Stream:
    """One request on a connection of its own; `seed` makes its tokens its own."""

    def __init__(self, url: str, seed: int, num_tokens: int = 50, num_prompt: int = 5) -> None:
        self.seed, self.num_tokens = seed, num_tokens
        self._url = f"{url}/generate"
        sampling = {"max_new_tokens": num_tokens, "ignore_eos": True, "sampling_seed": seed}
        ids = [random.Random(seed).randrange(5, 200) for _ in range(num_prompt)]
        self._body = {"input_ids": ids, "sampling_params": sampling, "stream": True}
        self.status = 0
        self.headers: dict[str, str] = {}
        self.error = ""
        self.output_ids: list[int] = []
        self.is_complete = False
        self.has_begun = asyncio.Event()

    async def run(self) -> Stream:
        """To its end, whatever that is; a connection that breaks is an error of the stream."""
        try:
            timeout = aiohttp.ClientTimeout(total=120)
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(self._url, json=self._body) as answer,
            ):
                self.status, self.headers = answer.status, dict(answer.headers)
                async for raw in answer.content:
                    self._take(raw.strip().removeprefix(b"data: "))
        except aiohttp.ClientError as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self.has_begun.set()
        return self

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.is_complete = True
        elif data:
            event: dict[str, Any] = json.loads(data)
            if "error" in event:
                self.error = event["error"]["message"]
            else:
                self.output_ids = event["output_ids"]
                self.has_begun.set()

    @property
    def is_right(self) -> bool:
        """All of its own tokens, and only those."""
        return self.is_complete and self.output_ids == expected(self.seed, self.num_tokens)

    @property
    def is_own(self) -> bool:
        """As far as it came, its own tokens."""
        return self.output_ids == expected(self.seed, len(self.output_ids))


async def begin(streams: list[Stream]) -> list[asyncio.Task[Stream]]:
    """Start them all; returns when each has a token, or an error."""
    tasks = [asyncio.create_task(stream.run()) for stream in streams]
    async with asyncio.timeout(60):
        await asyncio.gather(*(stream.has_begun.wait() for stream in streams))
    return tasks
