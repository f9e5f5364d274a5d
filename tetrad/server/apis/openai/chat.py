"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tetrad.server.apis.openai.answer import OpenAIAnswer
from tetrad.server.apis.openai.conversation import chat_choices
from tetrad.server.apis.openai.protocol import ChatBody
from tetrad.server.bodies.read import read_body
from tetrad.server.parsers.tools.events import ToolDelta
from tetrad.server.service import Service
from tetrad.server.stream.answers import EventStream, LaterJson
from tetrad.server.stream.choices import Choice, generate, new_id
from tetrad.server.stream.push import Renderer
from tetrad.server.stream.session import ChoiceFinish, Delta
from tetrad.server.text.logprobs import TokenEntry, chat_logprobs
from tetrad.server.wire.encoding import GrowingList, TextEvent, event

ROUTE = "/v1/chat/completions"


async def chat(service: Service, request: Request) -> Response:
    """Create a chat completion, whole or streamed."""
    body = await read_body(request, ChatBody)
    service.model.check_name(body.model)
    answer_id = new_id("chatcmpl")
    answer = _Answer(service, body, answer_id, await chat_choices(service, body, answer_id))
    return EventStream(answer.events) if body.stream else LaterJson(answer.whole)


class _Answer(OpenAIAnswer[ChatBody]):
    def __init__(
        self, service: Service, body: ChatBody, answer_id: str, choices: list[Choice]
    ) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__(service, body, {"id": answer_id, "object": kind}, choices, ROUTE)

    def _renderer(self) -> Renderer:
        has_begun = [False] * len(self._choices)

        def chunk(index: int, role: dict[str, Any], delta: Delta) -> dict[str, Any]:
            return self._chunk(self._chunk_choice(index, role, delta))

        def plain(index: int) -> tuple[TextEvent, TextEvent]:
            return (
                TextEvent(lambda text: chunk(index, {}, Delta(content=text))),
                TextEvent(lambda text: chunk(index, {}, Delta(reasoning=text))),
            )

        events = [plain(index) for index in range(len(self._choices))]

        def render(index: int, delta: Delta) -> bytes:
            if delta.is_plain and has_begun[index] and not self._body.has_running_usage:
                content, reasoning = events[index]
                return content(delta.content) if delta.content else reasoning(delta.reasoning)
            if not delta.is_visible:
                return b""
            role = {} if has_begun[index] else {"role": "assistant"}
            has_begun[index] = True
            return event(chunk(index, role, delta))

        def text(index: int) -> TextEvent | None:
            is_enough = has_begun[index] and not self._body.has_running_usage
            return events[index][0] if is_enough else None

        return render, text

    def _chunk_choice(self, index: int, role: dict[str, Any], delta: Delta) -> dict[str, Any]:
        fields = role
        if delta.reasoning:
            fields["reasoning_content"] = delta.reasoning
        if delta.content:
            fields["content"] = delta.content
        if delta.tool_calls:
            fields["tool_calls"] = [_tool_delta(piece) for piece in delta.tool_calls]
        return {
            "index": index,
            "delta": fields,
            "logprobs": self._logprobs(delta.entries) if delta.entries else None,
            **self._end(delta.finish),
        }

    async def whole(self) -> dict[str, Any]:
        drafts = [_Draft() for _ in self._choices]
        async with aclosing(generate(self._service, ROUTE, self._choices)) as found:
            async for deltas in found:
                self._add(drafts, deltas)
        choices = [self._whole_choice(index, draft) for index, draft in enumerate(drafts)]
        return self._head | {"choices": choices, "usage": self._usage()}

    def _add(self, drafts: Sequence[_Draft], deltas: Sequence[tuple[int, Delta]]) -> None:
        for index, delta in deltas:
            drafts[index].add(delta)
            if (told := self._logprobs(delta.entries)) is not None:
                drafts[index].logprobs.add(told["content"])

    def _whole_choice(self, index: int, draft: _Draft) -> dict[str, Any]:
        return {
            "index": index,
            "message": draft.message(),
            "logprobs": {"content": draft.logprobs} if self._body.logprobs else None,
            **self._end(draft.finish),
        }

    def _logprobs(self, entries: list[TokenEntry]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(self._service.model.tokenizer, entries)


def _tool_delta(piece: ToolDelta) -> dict[str, Any]:
    """The first piece of a call has its id, type and name."""
    if piece.name is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.call_id, "type": "function", "function": function}


@dataclass
class _Draft:
    """The pieces of one choice so far."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: GrowingList = field(default_factory=GrowingList)
    finish: ChoiceFinish | None = None

    def add(self, delta: Delta) -> None:
        self.content.append(delta.content)
        self.reasoning.append(delta.reasoning)
        self.finish = delta.finish
        for piece in delta.tool_calls:
            if piece.name is None:
                self.tool_calls[piece.index]["function"]["arguments"] += piece.arguments
            else:
                call = _tool_delta(piece)
                del call["index"]
                self.tool_calls.append(call)

    def message(self) -> dict[str, Any]:
        """The assistant's message; fields without anything are null, as OpenAI has them."""
        content = "".join(self.content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if self.tool_calls and not content else content,
            "reasoning_content": "".join(self.reasoning) or None,
        }
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message
