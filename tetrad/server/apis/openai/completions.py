"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from tetrad.core.request import SamplingParams
from tetrad.server.apis.openai.answer import OpenAIAnswer
from tetrad.server.apis.openai.protocol import CompletionBody
from tetrad.server.bodies.constraints import grammar_of
from tetrad.server.bodies.read import read_body
from tetrad.server.bodies.sampling import AnswerLimits, sampling_params, stop_strings
from tetrad.server.service import Service
from tetrad.server.stream.answers import EventStream, LaterJson
from tetrad.server.stream.choices import Choice, generate, make_choices, new_id, room_for_answer
from tetrad.server.stream.push import Renderer
from tetrad.server.stream.session import ChoiceFinish, Delta, Session
from tetrad.server.text.logprobs import completion_logprobs
from tetrad.server.wire.encoding import GrowingList, TextEvent, event, grow
from tetrad.server.wire.pace import in_turn

ROUTE = "/v1/completions"
DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


async def completions(service: Service, request: Request) -> Response:
    """Create completions of one prompt or several, given as text or token ids."""
    body = await read_body(request, CompletionBody)
    service.model.check_name(body.model)
    answer_id = new_id("cmpl")
    answer = _Answer(service, body, answer_id, await _choices(service, body, answer_id))
    return EventStream(answer.events) if body.stream else LaterJson(answer.whole)


async def _choices(service: Service, body: CompletionBody, answer_id: str) -> list[Choice]:
    model = service.model
    grammar = grammar_of(body)
    hidden_ids = model.hidden_ids(skip_special=body.skip_special_tokens is not False)

    def params(num_prompt: int) -> SamplingParams:
        default = room_for_answer(service, num_prompt, DEFAULT_MAX_TOKENS)
        limits = AnswerLimits(
            max_new_tokens=default if body.max_tokens is None else body.max_tokens,
            min_new_tokens=body.min_tokens or 0,
            num_logprobs=0 if body.logprobs is None and body.tries_more else body.logprobs,
            seed=body.seed,
        )
        return sampling_params(body, model.defaults, limits, grammar)

    def session(min_new_tokens: int) -> Session:
        return Session(
            model.tokenizer,
            stops=stop_strings(body),
            keep_stop=body.keeps_stop,
            min_new_tokens=min_new_tokens,
            hidden_ids=hidden_ids,
            is_mute=body.max_tokens == 0,
        )

    prompts = await model.prompt_ids(
        _prompts(body),
        service.engine.info["context_length"],
        add_special_tokens=body.add_special_tokens is not False,
    )

    def made() -> list[Choice]:
        with_params = [(ids, params(len(ids))) for ids in prompts]
        return make_choices(service, answer_id, with_params, body.num_tried, session)

    return await in_turn(made)


def _prompts(body: CompletionBody) -> list[str] | list[list[int]]:
    """One prompt is a batch of one."""
    prompt: Any = body.prompt
    is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
    return cast("list[str] | list[list[int]]", [prompt] if is_one else prompt)


def _echoes(service: Service, body: CompletionBody) -> list[str]:
    """What stands before the answers to each prompt."""
    prompts = _prompts(body)
    if not body.echo:
        return [""] * len(prompts)
    decode = service.model.tokenizer.decode
    return [prompt if isinstance(prompt, str) else decode(prompt) for prompt in prompts]


class _Answer(OpenAIAnswer[CompletionBody]):
    def __init__(
        self, service: Service, body: CompletionBody, answer_id: str, choices: list[Choice]
    ) -> None:
        head = {"id": answer_id, "object": "text_completion"}
        super().__init__(service, body, head, choices, ROUTE)
        self._echoes = _echoes(service, body)

    def _renderer(self) -> Renderer:
        def chunk(index: int, text: str, delta: Delta) -> dict[str, Any]:
            logprobs = self._logprobs(delta) if self._body.logprobs is not None else None
            return self._chunk(_choice(index, text, logprobs, self._end(delta.finish)))

        def plain_chunk(index: int, text: str) -> dict[str, Any]:
            return chunk(index, text, Delta())

        plain = [TextEvent(partial(plain_chunk, index)) for index in range(len(self._choices))]
        before = [self._echo(index) for index in range(len(self._choices))]
        is_special = self._body.logprobs is not None or self._body.has_running_usage

        def render(index: int, delta: Delta) -> bytes:
            if not delta.is_visible:
                return b""
            text, before[index] = before[index] + delta.content, ""
            if delta.is_plain and not is_special:
                return plain[index](text)
            return event(chunk(index, text, delta))

        def text(index: int) -> TextEvent | None:
            return None if before[index] or is_special else plain[index]

        return render, text

    async def whole(self) -> dict[str, Any]:
        drafts = [_Draft([self._echo(i)], self._no_logprobs()) for i in range(len(self._choices))]
        async with aclosing(generate(self._service, ROUTE, self._choices)) as found:
            async for deltas in found:
                self._add(drafts, deltas)
        best = [drafts[i] for i in self._best(drafts)]
        choices = [
            _choice(number, "".join(draft.texts), draft.logprobs, self._end(draft.finish))
            for number, draft in enumerate(best)
        ]
        return self._head | {"choices": choices, "usage": self._usage()}

    def _add(self, drafts: Sequence[_Draft], deltas: Sequence[tuple[int, Delta]]) -> None:
        for index, delta in deltas:
            draft = drafts[index]
            draft.add(delta)
            if draft.logprobs is not None:
                grow(draft.logprobs, self._logprobs(delta))

    def _best(self, drafts: Sequence[_Draft]) -> list[int]:
        """The `n` answers to each prompt whose tokens are most probable in the mean, best first;
        all of them, in order, unless more were tried."""
        tried = range(len(self._choices))
        if not self._body.tries_more:
            return list(tried)
        means = [draft.logprob / max(1, draft.num_entries) for draft in drafts]
        num_tried = self._body.num_tried
        groups = [tried[start : start + num_tried] for start in tried[::num_tried]]
        return [
            i
            for group in groups
            for i in sorted(group, key=lambda i: -means[i])[: self._body.n or 1]
        ]

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._body.num_tried]

    def _logprobs(self, delta: Delta) -> dict[str, list[Any]]:
        return completion_logprobs(self._service.model.tokenizer, delta.entries)

    def _no_logprobs(self) -> dict[str, GrowingList] | None:
        if self._body.logprobs is None:
            return None
        return {name: GrowingList() for name in self._logprobs(Delta())}


@dataclass
class _Draft:
    """One choice so far."""

    texts: list[str]
    logprobs: dict[str, GrowingList] | None
    logprob: float = 0.0
    """Of all tokens whose text is certain."""
    num_entries: int = 0
    finish: ChoiceFinish | None = None

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.content)
        self.logprob += sum(entry.values.logprob for entry in delta.entries)
        self.num_entries += len(delta.entries)
        self.finish = delta.finish


def _choice(
    index: int, text: str, logprobs: dict[str, Any] | None, end: dict[str, Any]
) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        **end,
    }
