"""From prompts to engine requests, and their outputs back as one stream of deltas."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from tetrad.core.errors import EngineDiedError, RequestError
from tetrad.core.request import Finish, Request, RequestOutput, SamplingParams
from tetrad.core.step import PAGE_TOKENS
from tetrad.server.arrival import arrival
from tetrad.server.engine_port import EnginePort
from tetrad.server.gate import Admission
from tetrad.server.metrics import RequestWatch
from tetrad.server.service import Service
from tetrad.server.session import Delta, GenerationError, Session

_log = logging.getLogger(__name__)

NUM_SEEDS = 2**63
ABORTED = Finish("abort")
MAX_CHOICES = 1024
"""Most answers of one HTTP request."""


@dataclass(frozen=True)
class Choice:
    """One sequence to generate: what the engine gets, and how its output is read."""

    request: Request
    session: Session
    is_first: bool = True
    """Whether it is the first of its prompt; the others let it compute the prompt for them."""


Deltas = AsyncGenerator[tuple[int, Delta], None]
"""(index of the choice, what a step added to it)."""


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def make_choices(
    answer_id: str,
    prompts: Sequence[tuple[Sequence[int], SamplingParams]],
    num_each: int,
    session: Callable[[int], Session],
) -> list[Choice]:
    """`num_each` choices of every (prompt, sampling), in order.

    With a seed, the choices of one prompt get the seeds after it, so that they differ. `session`
    makes the reader of one choice from its `min_new_tokens`. Raises RequestError for too many.
    """
    num_choices = len(prompts) * num_each
    if num_choices > MAX_CHOICES:
        raise RequestError(
            f"{len(prompts)} prompts with {num_each} choices each are {num_choices} answers; one "
            f"request may ask for {MAX_CHOICES}."
        )
    now = arrival()
    choices: list[Choice] = []
    for ids, params in prompts:
        for number in range(num_each):
            own = params
            if params.seed is not None:
                own = replace(params, seed=(params.seed + number) % NUM_SEEDS)
            rid = f"{answer_id}-{len(choices)}" if num_choices > 1 else answer_id
            request = Request(
                rid, tuple(ids), own, now.priority, now.key_name, request_id=now.request_id
            )
            choices.append(Choice(request, session(own.min_new_tokens), number == 0))
    return choices


def room_for_answer(service: Service, num_prompt: int, default: int | None = None) -> int:
    """Tokens an answer may have when the request does not say: `default`, or all that fit into the
    context and the cache.

    At least 1: a prompt that leaves no room is the engine's to refuse, with both lengths.
    """
    info = service.engine.info
    room: int = min(info["context_length"], info["max_total_tokens"]) - num_prompt
    return max(1, room if default is None else min(default, room))


async def generate(service: Service, route: str, choices: Sequence[Choice]) -> Deltas:
    """Run all choices; yields until every one has finished. Closing early aborts the rest."""
    engine = service.engine
    with (
        service.admit([len(choice.request.prompt_ids) for choice in choices]) as admission,
        RequestWatch(service.metrics, route, len(choices)) as watch,
    ):
        prompts = _prompts_known(choices, shares=not service.config.disable_radix_cache)
        streams = [
            _deltas(engine, choice, index, watch, admission, known)
            for index, (choice, known) in enumerate(zip(choices, prompts, strict=True))
        ]
        stream = streams[0] if len(streams) == 1 else _merge(streams)
        async with aclosing(stream):
            try:
                async for item in stream:
                    yield item
            except EngineDiedError as error:
                raise service.why_ended(error) from None
            except GenerationError as error:
                _log.error("%s failed: %s", choices[0].request.rid, error)
                raise
            finally:
                told = arrival()
                told.completion_tokens = sum(choice.session.completion_tokens for choice in choices)


def _prompts_known(choices: Sequence[Choice], *, shares: bool) -> list[asyncio.Event | None]:
    """For each choice what tells that its prompt is computed: once it has a token its full pages
    are in the prefix cache. None if there is nothing to share, or nobody to share with."""
    known: list[asyncio.Event | None] = []
    event: asyncio.Event | None = None
    for choice in choices:
        if choice.is_first:
            is_long = len(choice.request.prompt_ids) > PAGE_TOKENS
            event = asyncio.Event() if shares and is_long else None
        known.append(event)
    return known


async def _deltas(
    engine: EnginePort,
    choice: Choice,
    index: int,
    watch: RequestWatch,
    admission: Admission,
    prompt_known: asyncio.Event | None,
) -> Deltas:
    session = choice.session
    if prompt_known is not None and not choice.is_first:
        await prompt_known.wait()
        if arrival().finish == "abort":
            yield index, session.feed(RequestOutput(choice.request.rid, (), finish=ABORTED))
            return
    async with aclosing(engine.generate(choice.request)) as outputs:
        async for output in outputs:
            if session.completion_tokens == 0:
                if output.token_ids:
                    watch.first_token(index, output)
                admission.first_token(index)
                if prompt_known is not None:
                    prompt_known.set()
            delta = session.feed(output)
            if delta.finish is not None:
                watch.last_token(index, session.completion_tokens, delta.finish.reason)
            yield index, delta
            if delta.finish is not None:
                return
    raise EngineDiedError("The engine ended this request without saying why.")


async def _merge(streams: Sequence[Deltas]) -> Deltas:
    """Several streams as one, in the order their items come; the first failure ends all."""
    queue: asyncio.Queue[tuple[int, Delta] | BaseException | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    num_open = len(tasks)
    try:
        while num_open:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    stream: Deltas, queue: asyncio.Queue[tuple[int, Delta] | BaseException | None]
) -> None:
    try:
        async with aclosing(stream):
            async for item in stream:
                queue.put_nowait(item)
        queue.put_nowait(None)
    except Exception as error:  # noqa: BLE001 - raised again by whoever reads the queue
        queue.put_nowait(error)
