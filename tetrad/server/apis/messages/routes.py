"""Anthropic's POST /v1/messages and /v1/messages/count_tokens, translated to a chat.

Thinking blocks are the reasoning. They carry no signature: what a client sends back is believed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tetrad.core.errors import AbortedError, RequestError, TetradError
from tetrad.server.apis.messages.protocol import CountBody, MessagesBody, chat_of
from tetrad.server.apis.openai.conversation import chat_choices, chat_prompt, translated
from tetrad.server.apis.openai.protocol import ChatBody
from tetrad.server.bodies.read import read_body
from tetrad.server.service import Service
from tetrad.server.stream.answers import EventStream, LaterJson, Wire
from tetrad.server.stream.blocks import Block, BlockEvent, BlockReader, block_id
from tetrad.server.stream.choices import Choice, generate
from tetrad.server.stream.push import Outlet, ShortWay, together
from tetrad.server.stream.session import WHY_ABORTED, ChoiceFinish, Delta
from tetrad.server.wire.encoding import TextEvent, event
from tetrad.server.wire.failures import NO_THREADS, anthropic_body, http_status, reason_of

ROUTE = "/v1/messages"
COUNT_ROUTE = "/v1/messages/count_tokens"


def _error(error: TetradError) -> bytes:
    return event(anthropic_body(str(error), http_status(error), *reason_of(error)), "error")


NO_THREAD = (
    "thread: no conversation is stored here, so one cannot be continued; send all its messages and "
    "leave this field out."
)
ANTHROPIC = Wire(b"", _error)


async def messages(service: Service, request: Request) -> Response:
    """Create a message, whole or streamed."""
    body = await read_body(request, MessagesBody)
    service.model.check_name(body.model)
    answer_id = block_id("msg")
    (choice,) = await chat_choices(service, await _chat(body), answer_id)
    answer = _Answer(service, answer_id, choice)
    return EventStream(answer.events, ANTHROPIC) if body.stream else LaterJson(answer.whole)


async def count_tokens(service: Service, request: Request) -> Response:
    """Count the prompt tokens of a conversation."""
    body = await read_body(request, CountBody)
    service.model.check_name(body.model)
    _, ids = await chat_prompt(service, await _chat(body))
    return JSONResponse({"input_tokens": len(ids)})


async def _chat(body: CountBody) -> ChatBody:
    if body.thread is not None:
        raise RequestError(NO_THREAD, param="thread", code=NO_THREADS)
    return await translated(body.num_parts, lambda: chat_of(body))


class _Answer:
    """One answer, streamed or whole."""

    def __init__(self, service: Service, answer_id: str, choice: Choice) -> None:
        self._service = service
        self._answer_id = answer_id
        self._choice = choice
        self._reader = BlockReader()
        self._finish: ChoiceFinish | None = None
        self._pieces: dict[int, TextEvent] = {}
        """For each block the events of its text."""

    async def events(self, outlet: Outlet | None) -> AsyncGenerator[bytes, None]:
        """From message_start to message_stop, an event for each piece of a block."""
        has_begun = False
        short_way = ShortWay(self._render, outlet) if outlet else None
        choices = (self._choice,)
        async with aclosing(generate(self._service, ROUTE, choices, short_way)) as found:
            async for deltas in found:
                if not has_begun:
                    has_begun = True
                    yield event(
                        {"type": "message_start", "message": self._message()}, "message_start"
                    )
                    yield event({"type": "ping"}, "ping")
                self._finish = deltas[-1][1].finish
                async for piece in together(self._render, deltas):
                    yield piece
        self._check_end()
        end = {"type": "message_delta", "delta": self._end(), "usage": self._usage()}
        yield event(end, "message_delta")
        yield event({"type": "message_stop"}, "message_stop")

    def _render(self, _index: int, delta: Delta) -> bytes:
        return b"".join(self._event(happened) for happened in self._reader.feed(delta))

    def _event(self, happened: BlockEvent) -> bytes:
        block = happened.block
        if happened.phase == "more":
            return self._pieces[block.index](happened.text)
        name = f"content_block_{happened.phase}"
        value: dict[str, Any] = {"type": name, "index": block.index}
        if happened.phase == "start":
            self._pieces[block.index] = _pieces_of(block)
            value["content_block"] = _content(block)
        return event(value, name)

    async def whole(self) -> dict[str, Any]:
        """The complete answer."""
        async with aclosing(generate(self._service, ROUTE, (self._choice,))) as found:
            async for deltas in found:
                for _, delta in deltas:
                    self._finish = delta.finish
                    for _ in self._reader.feed(delta):
                        pass
        self._check_end()
        return self._message()

    def _check_end(self) -> None:
        """An operator's end is none of Anthropic's reasons to stop, and no client should take it
        for one of them. Raises AbortedError."""
        if self._finish is not None and self._finish.reason == "abort":
            raise AbortedError(WHY_ABORTED)

    def _message(self) -> dict[str, Any]:
        """The message so far."""
        return {
            "id": self._answer_id,
            "type": "message",
            "role": "assistant",
            "model": self._service.model.name,
            "content": [_content(block) for block in self._reader.blocks],
            **self._end(),
            "usage": self._usage(),
        }

    def _end(self) -> dict[str, Any]:
        finish = self._finish
        if finish is None:
            return {"stop_reason": None, "stop_sequence": None}
        if isinstance(finish.matched, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": finish.matched}
        reasons = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
        return {"stop_reason": reasons[finish.reason], "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        """Tokens from the prefix cache are not among Anthropic's input_tokens."""
        session = self._choice.session
        return {
            "input_tokens": session.prompt_tokens - session.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": session.cached_tokens,
            "output_tokens": session.completion_tokens,
            "output_tokens_details": {"thinking_tokens": session.reasoning_tokens},
        }


def _content(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": block.text, "citations": None}
    return {
        "type": "tool_use",
        "id": block.call_id,
        "name": block.name,
        "input": block.arguments or {},
    }


def _pieces_of(block: Block) -> TextEvent:
    kind, name = {
        "reasoning": ("thinking_delta", "thinking"),
        "text": ("text_delta", "text"),
        "tool": ("input_json_delta", "partial_json"),
    }[block.kind]

    def value(text: str) -> dict[str, Any]:
        return {
            "type": "content_block_delta",
            "index": block.index,
            "delta": {"type": kind, name: text},
        }

    return TextEvent(value, "content_block_delta")
