"""SGLang's POST /generate: text so far with every event, and `meta_info`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tetrad.core.errors import RequestError
from tetrad.core.request import SamplingParams
from tetrad.server.apis.native.protocol import GenerateBody, NativeSampling
from tetrad.server.bodies.constraints import grammar_of
from tetrad.server.bodies.read import read_body
from tetrad.server.bodies.sampling import AnswerLimits, sampling_params, stop_strings
from tetrad.server.service import Service
from tetrad.server.stream.answers import EventStream, LaterJson
from tetrad.server.stream.choices import (
    Choice,
    generate,
    make_choices,
    new_id,
    pieces,
    room_for_answer,
)
from tetrad.server.stream.push import Outlet
from tetrad.server.stream.session import WHY_ABORTED, ChoiceFinish, Delta, Session
from tetrad.server.text.logprobs import native_logprobs
from tetrad.server.wire.encoding import GrowingList, grow, grown_event
from tetrad.server.wire.pace import in_turn

ROUTE = "/generate"
DEFAULT_MAX_NEW_TOKENS = 128
"""SGLang's."""
WEIGHT_VERSION = "default"
"""Weights never change while a server runs."""


async def native_generate(service: Service, request: Request) -> Response:
    """Generate text for one prompt, which gives an object, or for a batch, which gives a list."""
    body = await read_body(request, GenerateBody)
    answer = _Answer(service, body, await _choices(service, body))
    return EventStream(answer.events) if body.stream else LaterJson(answer.whole)


async def _choices(service: Service, body: GenerateBody) -> list[Choice]:
    context_tokens = service.engine.info["context_length"]
    prompts = await service.model.prompt_ids(body.prompts, context_tokens)
    samplings = _per_prompt(body.sampling_params or NativeSampling(), len(prompts))
    names = _rids(body, len(prompts))

    def made() -> list[Choice]:
        choices: list[Choice] = []
        for ids, sampling, name in zip(prompts, samplings, names, strict=True):
            params = _params(service, body, sampling, len(ids))
            session = _sessions(service, sampling)
            choices += make_choices(service, name, [(ids, params)], sampling.n or 1, session)
        return choices

    return await in_turn(made)


def _per_prompt(
    given: NativeSampling | list[NativeSampling], num_prompts: int
) -> Sequence[NativeSampling]:
    if isinstance(given, NativeSampling):
        return [given] * num_prompts
    if len(given) != num_prompts:
        raise RequestError(
            f"{len(given)} sampling_params for {num_prompts} prompts; give one, or one for each.",
            param="sampling_params",
        )
    return given


def _rids(body: GenerateBody, num_prompts: int) -> list[str]:
    if body.rid is None:
        return [new_id("gen") for _ in range(num_prompts)]
    names = [body.rid] if isinstance(body.rid, str) else body.rid
    if len(names) != num_prompts or len(set(names)) != num_prompts:
        raise RequestError(f"rid must name each of the {num_prompts} prompts once.", param="rid")
    return names


def _params(
    service: Service, body: GenerateBody, sampling: NativeSampling, num_prompt: int
) -> SamplingParams:
    default = room_for_answer(service, num_prompt, DEFAULT_MAX_NEW_TOKENS)
    limits = AnswerLimits(
        max_new_tokens=default if sampling.max_new_tokens is None else sampling.max_new_tokens,
        min_new_tokens=sampling.min_new_tokens or 0,
        num_logprobs=body.num_logprobs,
        seed=sampling.sampling_seed,
    )
    return sampling_params(sampling, service.model.defaults, limits, grammar_of(sampling))


def _sessions(service: Service, sampling: NativeSampling) -> Any:
    model = service.model
    hidden_ids = model.hidden_ids(skip_special=sampling.skip_special_tokens is not False)

    def session(min_new_tokens: int) -> Session:
        return Session(
            model.tokenizer,
            stops=stop_strings(sampling),
            keep_stop=sampling.keeps_stop,
            min_new_tokens=min_new_tokens,
            hidden_ids=hidden_ids,
            is_mute=sampling.max_new_tokens == 0,
        )

    return session


@dataclass
class _Draft:
    """One choice so far."""

    num_top: int
    """So many of the likeliest tokens are told at each place."""
    text: str = ""
    token_ids: GrowingList = field(default_factory=GrowingList)
    logprobs: dict[str, GrowingList] = field(init=False)
    num_logprobs: int = 0
    finish: ChoiceFinish | None = None

    def __post_init__(self) -> None:
        self.logprobs = {name: GrowingList() for name in native_logprobs((), self.num_top)}

    def add(self, delta: Delta) -> None:
        self.text += delta.content
        self.token_ids.add(delta.token_ids)
        if delta.logprobs:
            grow(self.logprobs, native_logprobs(delta.logprobs, self.num_top))
            self.num_logprobs += len(delta.logprobs)
        self.finish = delta.finish


class _Answer:
    """One answer, streamed or whole."""

    def __init__(self, service: Service, body: GenerateBody, choices: list[Choice]) -> None:
        self._service = service
        self._body = body
        self._choices = choices
        self._is_list = body.is_batch or len(choices) > 1
        self._drafts = [_Draft(body.num_logprobs or 0) for _ in choices]
        self._arrived_at = time.perf_counter()

    def events(self, outlet: Outlet | None) -> AsyncGenerator[bytes, None]:
        """Every event holds all of its choice so far; several choices say which they are."""
        return pieces(self._service, ROUTE, self._choices, outlet, self._render)

    def _render(self, index: int, delta: Delta) -> bytes:
        self._drafts[index].add(delta)
        if not (delta.token_ids or delta.finish):
            return b""
        value = self._value(index)
        return grown_event(value | {"index": index} if self._is_list else value)

    async def whole(self) -> Any:
        """The complete answer: an object, or a list of them."""
        async with aclosing(generate(self._service, ROUTE, self._choices)) as found:
            async for deltas in found:
                self._add(deltas)
        values = [self._value(index) for index in range(len(self._choices))]
        return values if self._is_list else values[0]

    def _add(self, deltas: Sequence[tuple[int, Delta]]) -> None:
        for index, delta in deltas:
            self._drafts[index].add(delta)

    def _value(self, index: int) -> dict[str, Any]:
        draft = self._drafts[index]
        return {
            "text": draft.text,
            "output_ids": draft.token_ids,
            "meta_info": self._meta_info(self._choices[index], draft),
        }

    def _meta_info(self, choice: Choice, draft: _Draft) -> dict[str, Any]:
        session = choice.session
        meta: dict[str, Any] = {
            "id": choice.request.rid,
            "finish_reason": _finish_reason(draft.finish, session.completion_tokens),
            "prompt_tokens": session.prompt_tokens,
            "completion_tokens": session.completion_tokens,
            "cached_tokens": session.cached_tokens,
            "reasoning_tokens": session.reasoning_tokens,
            "num_retractions": session.num_preemptions,
            "weight_version": WEIGHT_VERSION,
        }
        if draft.finish is not None:
            meta["e2e_latency"] = time.perf_counter() - self._arrived_at
        if self._body.return_logprob:
            meta |= draft.logprobs
            meta["output_token_logprobs_length"] = draft.num_logprobs
        return meta


def _finish_reason(finish: ChoiceFinish | None, num_tokens: int) -> dict[str, Any] | None:
    if finish is None:
        return None
    if finish.reason == "abort":
        return {"type": "abort", "message": WHY_ABORTED}
    if finish.reason == "length":
        return {"type": "length", "length": num_tokens}
    return {"type": "stop", "matched": finish.matched}
