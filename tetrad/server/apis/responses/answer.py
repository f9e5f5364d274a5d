"""One of OpenAI's responses: as an object, and as the events of its stream.

    created → in_progress → for each item: added, its parts, their pieces, done → completed

A stream that breaks ends with response.failed, which clients understand better than a broken one.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from typing import Any

from tetrad.core.errors import TetradError
from tetrad.server.apis.responses.protocol import ResponsesBody
from tetrad.server.service import Service
from tetrad.server.stream.blocks import Block, BlockEvent, BlockReader
from tetrad.server.stream.choices import Choice, Deltas, generate
from tetrad.server.stream.push import Outlet, ShortWay, together
from tetrad.server.stream.session import ChoiceFinish, Delta
from tetrad.server.wire.encoding import event

ROUTE = "/v1/responses"


class ResponseAnswer:
    """One answer, streamed or whole. `on_end` is called once, when it can change no more."""

    def __init__(
        self,
        service: Service,
        body: ResponsesBody,
        response_id: str,
        choice: Choice,
        on_end: Callable[[ResponseAnswer], None],
    ) -> None:
        self.response_id = response_id
        self.status = "in_progress"
        self.is_stored = False
        """What the client is told of it."""
        self._service = service
        self._body = body
        self._choice = choice
        self._on_end = on_end
        self._created_at = int(time.time())
        self._completed_at: int | None = None
        self._error: dict[str, Any] | None = None
        self._reader = BlockReader()
        self._finish: ChoiceFinish | None = None
        self._num_events = 0

    @property
    def blocks(self) -> list[Block]:
        return self._reader.blocks

    async def events(self, outlet: Outlet | None) -> AsyncGenerator[bytes, None]:
        """The events of its stream."""
        short_way = ShortWay(self._render_delta, outlet) if outlet else None
        has_begun = False
        async with aclosing(self._deltas(short_way)) as found:
            async for deltas in found:
                if not has_begun:
                    has_begun = True
                    yield self._event("response.created", response=self.value())
                    yield self._event("response.in_progress", response=self.value())
                async for piece in together(self._render_delta, deltas):
                    yield piece
        yield self._event(f"response.{self.status}", response=self.value())

    def _render_delta(self, _index: int, delta: Delta) -> bytes:
        happenings = self._reader.feed(delta)
        return b"".join(piece for happened in happenings for piece in self._render(happened))

    def broken(self, error: TetradError) -> bytes:
        """The last event of a stream that breaks."""
        self.fail(str(error))
        return self._event("response.failed", response=self.value())

    async def whole(self) -> dict[str, Any]:
        """The complete response."""
        async with aclosing(self._deltas()) as found:
            async for deltas in found:
                for _, delta in deltas:
                    for _happened in self._reader.feed(delta):
                        pass
        return self.value()

    async def _deltas(self, short_way: ShortWay | None = None) -> Deltas:
        """What steps add, but for what goes by `short_way`; then the response has ended."""
        choices = (self._choice,)
        async with aclosing(generate(self._service, ROUTE, choices, short_way)) as found:
            async for deltas in found:
                self._finish = deltas[-1][1].finish
                yield deltas
        is_cut = self._finish is not None and self._finish.reason in ("length", "abort")
        self._end("incomplete" if is_cut else "completed")

    def fail(self, reason: str) -> None:
        """It ends with an error of the server's."""
        self._error = {"code": "server_error", "message": reason}
        self._end("failed")

    def cancel(self) -> None:
        """It ends because somebody asked for that."""
        self._end("cancelled")

    def _end(self, status: str) -> None:
        self.status = status
        self._completed_at = int(time.time()) if status == "completed" else None
        self._on_end(self)

    def value(self) -> dict[str, Any]:
        """The response as it is now."""
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": self._completed_at,
            "status": self.status,
            "error": self._error,
            "incomplete_details": self._why_incomplete(),
            "output": [self._item(block) for block in self.blocks],
            "usage": self._usage() if self.status in ("completed", "incomplete") else None,
            **self._asked(),
        }

    def _why_incomplete(self) -> dict[str, Any] | None:
        """None also if an operator ended it."""
        finish = self._finish if self.status == "incomplete" else None
        is_cut = finish is not None and finish.reason == "length"
        return {"reason": "max_output_tokens"} if is_cut else None

    def _asked(self) -> dict[str, Any]:
        """What was asked for, with the values in effect."""
        body, sampling = self._body, self._choice.request.sampling
        reasoning, text = body.reasoning, body.text
        return {
            "model": self._service.model.name,
            "instructions": body.instructions,
            "previous_response_id": body.previous_response_id,
            "background": bool(body.background),
            "store": self.is_stored,
            "metadata": body.metadata or {},
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
            "text": {"format": (text.format if text else None) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.model_dump(exclude_unset=True) for tool in body.tools or ()],
            "top_logprobs": 0,
            "truncation": "disabled",
            "service_tier": "default",
            "user": None,
        }

    def _usage(self) -> dict[str, Any]:
        session = self._choice.session
        return {
            "input_tokens": session.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": session.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": session.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": session.reasoning_tokens},
            "total_tokens": session.prompt_tokens + session.completion_tokens,
        }

    def _item(self, block: Block, *, is_open: bool = False) -> dict[str, Any]:
        status = "in_progress" if is_open else "incomplete" if block.is_cut else "completed"
        head = {"id": block.block_id, "status": status}
        if block.kind == "tool":
            call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
            return {**head, "type": "function_call", **call}
        content = [] if is_open else [_part(block)]
        if block.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}

    def _render(self, happened: BlockEvent) -> Iterator[bytes]:
        block = happened.block
        where: dict[str, Any] = {"item_id": block.block_id, "output_index": block.index}
        if block.kind != "tool":
            where["content_index"] = 0
        kind, last = _KINDS[block.kind]
        if happened.phase == "more":
            if block.kind == "text":
                where["logprobs"] = []
            yield self._event(f"{kind}.delta", **where, delta=happened.text)
            return
        if happened.phase == "start":
            item = self._item(block, is_open=True)
            yield self._event("response.output_item.added", output_index=block.index, item=item)
            if block.kind != "tool":
                yield self._event("response.content_part.added", **where, part=_part(block))
            return
        yield self._event(f"{kind}.done", **where, **last(block))
        if block.kind != "tool":
            yield self._event("response.content_part.done", **where, part=_part(block))
        item = self._item(block)
        yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _event(self, kind: str, **fields: Any) -> bytes:
        value = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event(value, kind)


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


_KINDS: dict[str, tuple[str, Callable[[Block], dict[str, Any]]]] = {
    "reasoning": ("response.reasoning_text", lambda block: {"text": block.text}),
    "text": ("response.output_text", lambda block: {"text": block.text, "logprobs": []}),
    "tool": (
        "response.function_call_arguments",
        lambda block: {"name": block.name, "arguments": block.text},
    ),
}
"""Of each kind of block: what its events are called, and what the last one says."""
