"""From prompts to engine requests, and their outputs back as one stream of deltas."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from tetrad.core.errors import EngineDiedError, RequestError
from tetrad.core.request import Finish, Request, RequestOutput, SamplingParams, packed
from tetrad.core.step import PAGE_TOKENS
from tetrad.engine.prefix import names_of
from tetrad.server.door.arrival import arrival
from tetrad.server.engine_port import EnginePort
from tetrad.server.service import Service
from tetrad.server.stream.push import (
    ChoiceReader,
    Inbox,
    Outlet,
    Render,
    ShortWay,
    Texts,
    no_texts,
    together,
)
from tetrad.server.stream.session import Delta, GenerationError, Session
from tetrad.server.telemetry.metrics import RequestWatch
from tetrad.server.wire.pace import in_turn, in_turn_later

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


Deltas = AsyncGenerator[list[tuple[int, Delta]], None]
"""(index of the choice, what a step added to it), as many as came together."""


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def make_choices(
    service: Service,
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
        prompt = packed(ids)
        page_names = () if service.config.disable_radix_cache else names_of(prompt)
        for number in range(num_each):
            own = params
            if params.seed is not None:
                own = replace(params, seed=(params.seed + number) % NUM_SEEDS)
            is_alone = num_choices == 1
            request = Request(
                answer_id if is_alone else f"{answer_id}-{len(choices)}",
                prompt,
                own,
                now.priority,
                now.key_name,
                request_id=now.request_id,
                answer_id="" if is_alone else answer_id,
                page_names=page_names,
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


async def generate(
    service: Service, route: str, choices: Sequence[Choice], short_way: ShortWay | None = None
) -> Deltas:
    """Run all choices; yields until every one has finished. Closing early aborts the rest.

    What can go by `short_way` is not among what is yielded.
    """
    with (
        service.admit([choice.request.num_prompt for choice in choices]) as admission,
        RequestWatch(service.metrics, route, len(choices)) as watch,
    ):
        inbox = Inbox()
        readers = [
            ChoiceReader(choice.session, index, watch, admission, inbox, short_way)
            for index, choice in enumerate(choices)
        ]
        running = _Running(service.engine, choices, readers, watch)
        try:
            waiting = _waiting(choices, shares=not service.config.disable_radix_cache)
            first = set(range(len(choices))).difference(*waiting.values())
            await in_turn(partial(running.begin, first))
            num_open = len(choices)
            while num_open:
                deltas = await inbox.get()
                for index, delta in deltas:
                    running.follow(waiting.pop(index, ()), delta)
                    if delta.finish is not None:
                        num_open -= 1
                        running.leave(index)
                yield deltas
        except EngineDiedError as error:
            watch.engine_died()
            raise service.why_ended(error) from None
        except GenerationError as error:
            _log.error("%s failed: %s", choices[0].request.rid, error)
            raise
        finally:
            for reader in readers:
                reader.close()
            in_turn_later(running.leave_all)
            told = arrival()
            told.completion_tokens = sum(choice.session.completion_tokens for choice in choices)


async def pieces(
    service: Service,
    route: str,
    choices: Sequence[Choice],
    outlet: Outlet | None,
    render: Render,
    text: Texts = no_texts,
) -> AsyncGenerator[bytes, None]:
    """The events of a streamed answer but for those that go to `outlet`, if there is one; `render`
    and `text` as in ShortWay."""
    short_way = ShortWay(render, outlet, text) if outlet else None
    async with aclosing(generate(service, route, choices, short_way)) as found:
        async for deltas in found:
            async for piece in together(render, deltas):
                yield piece


def _waiting(choices: Sequence[Choice], *, shares: bool) -> dict[int, list[int]]:
    """By the first choice of a prompt the others of it, which begin when its prompt is computed:
    once it has a token its full pages are in the prefix cache. Empty if there is nothing to share.
    """
    waiting: dict[int, list[int]] = {}
    first = 0
    for index, choice in enumerate(choices):
        if choice.is_first:
            first = index
        elif shares and choice.request.num_prompt > PAGE_TOKENS:
            waiting.setdefault(first, []).append(index)
    return waiting


class _Running:
    """The choices of one answer in the engine."""

    def __init__(
        self,
        engine: EnginePort,
        choices: Sequence[Choice],
        readers: Sequence[ChoiceReader],
        watch: RequestWatch,
    ) -> None:
        self._engine = engine
        self._watch = watch
        self._choices = choices
        self._readers = readers
        self._leave: dict[int, Callable[[], None]] = {}

    def begin(self, indexes: Iterable[int]) -> None:
        """Have the engine serve these."""
        for index in indexes:
            self._watch.begun(index)
            request, reader = self._choices[index].request, self._readers[index]
            self._leave[index] = self._engine.begin(request, reader)

    def follow(self, indexes: Iterable[int], first: Delta) -> None:
        """Those that waited for the `first` of their prompt begin, or end with it where an operator
        has ended it before its first token."""
        if first.finish is None or first.finish.reason != ABORTED.reason:
            self.begin(indexes)
            return
        for index in indexes:
            self._watch.begun(index)
            rid = self._choices[index].request.rid
            self._readers[index].take(RequestOutput(rid, (), finish=ABORTED))

    def leave(self, index: int) -> None:
        """Nothing more of this one is wanted."""
        if leave := self._leave.pop(index, None):
            leave()

    def leave_all(self) -> None:
        """Of any."""
        for index in list(self._leave):
            self.leave(index)
