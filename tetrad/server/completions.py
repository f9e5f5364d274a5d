"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from tetrad.core.request import SamplingParams
from tetrad.server.answers import EventStream, LaterJson
from tetrad.server.bodies import read_body
from tetrad.server.choices import Choice, generate, make_choices, new_id, room_for_answer
from tetrad.server.encoding import TextEvent, event
from tetrad.server.logprobs import TokenEntry, completion_logprobs
from tetrad.server.protocol import CompletionBody
from tetrad.server.sampling import AnswerLimits, sampling_params, stop_strings
from tetrad.server.service import Service
from tetrad.server.session import ChoiceFinish, Delta, Session
from tetrad.server.usage import usage

ROUTE = "/v1/completions"
DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


async def completions(service: Service, request: Request) -> Response:
    """Prompts as text or token ids, one or many; the answer begins when the response is sent."""
    body = await read_body(request, CompletionBody)
    service.model.check_name(body.model)
    answer_id = new_id("cmpl")
    answer = _Answer(service, body, answer_id, await _choices(service, body, answer_id))
    return EventStream(answer.events) if body.stream else LaterJson(answer.whole)


async def _choices(service: Service, body: CompletionBody, answer_id: str) -> list[Choice]:
    model = service.model
    hidden_ids = model.hidden_ids(skip_special=body.skip_special_tokens is not False)

    def params(num_prompt: int) -> SamplingParams:
        default = room_for_answer(service, num_prompt, DEFAULT_MAX_TOKENS)
        limits = AnswerLimits(
            max_new_tokens=body.max_tokens or default,
            min_new_tokens=body.min_tokens or 0,
            num_logprobs=body.logprobs,
            seed=body.seed,
        )
        return sampling_params(body, model.defaults, limits)

    def session(min_new_tokens: int) -> Session:
        return Session(
            model.tokenizer,
            stops=stop_strings(body),
            min_new_tokens=min_new_tokens,
            hidden_ids=hidden_ids,
        )

    prompts = await model.prompt_ids(_prompts(body), service.engine.info["context_length"])
    with_params = [(ids, params(len(ids))) for ids in prompts]
    return make_choices(answer_id, with_params, body.n or 1, session)


def _prompts(body: CompletionBody) -> list[str] | list[list[int]]:
    """One prompt is a batch of one."""
    prompt: Any = body.prompt
    is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
    return cast("list[str] | list[list[int]]", [prompt] if is_one else prompt)


class _Answer:
    """One answer, streamed or whole."""

    def __init__(
        self, service: Service, body: CompletionBody, answer_id: str, choices: list[Choice]
    ) -> None:
        self._service = service
        self._body = body
        self._choices = choices
        self._head = {
            "id": answer_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model.name,
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Chunks, as events."""
        tail: dict[str, Any] = {"usage": None} if self._body.include_usage else {}

        def chunk(index: int, delta: Delta) -> dict[str, Any]:
            choice = self._choice(index, delta.content, delta.entries, delta.finish)
            return self._head | {"choices": [choice]} | tail

        def plain_event(index: int) -> TextEvent:
            return TextEvent(lambda text: chunk(index, Delta(content=text)))

        plain = [plain_event(index) for index in range(len(self._choices))]
        has_logprobs = self._body.logprobs is not None
        async with aclosing(generate(self._service, ROUTE, self._choices)) as deltas:
            async for index, delta in deltas:
                if delta.is_plain and not has_logprobs:
                    yield plain[index](delta.content)
                elif delta.is_visible:
                    yield event(chunk(index, delta))
        if self._body.include_usage:
            yield event(self._head | {"choices": [], "usage": self._usage()})

    async def whole(self) -> dict[str, Any]:
        """The complete answer."""
        texts: list[list[str]] = [[] for _ in self._choices]
        entries: list[list[TokenEntry]] = [[] for _ in self._choices]
        finishes: list[ChoiceFinish | None] = [None] * len(self._choices)
        async with aclosing(generate(self._service, ROUTE, self._choices)) as deltas:
            async for index, delta in deltas:
                texts[index].append(delta.content)
                entries[index] += delta.entries
                finishes[index] = delta.finish
        choices = [
            self._choice(index, "".join(texts[index]), entries[index], finishes[index])
            for index in range(len(self._choices))
        ]
        return self._head | {"choices": choices, "usage": self._usage()}

    def _choice(
        self, index: int, text: str, entries: list[TokenEntry], finish: ChoiceFinish | None
    ) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = completion_logprobs(self._service.model.tokenizer, entries)
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish.reason if finish else None,
            "matched_stop": finish.matched if finish else None,
        }

    def _usage(self) -> dict[str, Any]:
        return usage(self._choices, self._body.n or 1)
