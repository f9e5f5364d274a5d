"""POST /v1/completions."""

from __future__ import annotations

from contextlib import aclosing
from functools import partial
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from tetrad.core.request import SamplingParams
from tetrad.server.answers import EventStream, LaterJson
from tetrad.server.bodies import read_body
from tetrad.server.choices import Choice, generate, make_choices, new_id, room_for_answer
from tetrad.server.constraints import grammar_of
from tetrad.server.encoding import TextEvent, event
from tetrad.server.logprobs import TokenEntry, completion_logprobs
from tetrad.server.openai_answer import OpenAIAnswer
from tetrad.server.protocol import CompletionBody
from tetrad.server.push import Renderer
from tetrad.server.sampling import AnswerLimits, sampling_params, stop_strings
from tetrad.server.service import Service
from tetrad.server.session import ChoiceFinish, Delta, Session

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
            max_new_tokens=body.max_tokens or default,
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
        )

    prompts = await model.prompt_ids(
        _prompts(body),
        service.engine.info["context_length"],
        add_special_tokens=body.add_special_tokens is not False,
    )
    with_params = [(ids, params(len(ids))) for ids in prompts]
    return make_choices(answer_id, with_params, body.num_tried, session)


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
            return self._chunk(self._choice(index, text, delta.entries, delta.finish))

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
        texts: list[list[str]] = [[] for _ in self._choices]
        entries: list[list[TokenEntry]] = [[] for _ in self._choices]
        finishes: list[ChoiceFinish | None] = [None] * len(self._choices)
        async with aclosing(generate(self._service, ROUTE, self._choices)) as found:
            async for deltas in found:
                for index, delta in deltas:
                    texts[index].append(delta.content)
                    entries[index] += delta.entries
                    finishes[index] = delta.finish
        choices = [
            self._choice(number, self._echo(i) + "".join(texts[i]), entries[i], finishes[i])
            for number, i in enumerate(self._best(entries))
        ]
        return self._head | {"choices": choices, "usage": self._usage()}

    def _best(self, entries: list[list[TokenEntry]]) -> list[int]:
        """The `n` answers to each prompt whose tokens are most probable in the mean, best first;
        all of them, in order, unless more were tried."""
        tried = range(len(self._choices))
        if not self._body.tries_more:
            return list(tried)
        means = [sum(e.values.logprob for e in own) / max(1, len(own)) for own in entries]
        num_tried = self._body.num_tried
        groups = [tried[start : start + num_tried] for start in tried[::num_tried]]
        return [
            i
            for group in groups
            for i in sorted(group, key=lambda i: -means[i])[: self._body.n or 1]
        ]

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._body.num_tried]

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
            **self._end(finish),
        }
