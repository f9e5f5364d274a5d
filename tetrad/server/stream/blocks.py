"""An answer as a row of blocks: reasoning, text and tool calls, one after the other.

Chat sends pieces of each kind as they come; OpenAI's responses and Anthropic's messages number the
blocks instead, and open and close each. Both are made from the same deltas here.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from tetrad.server.parsers.tools.events import ToolDelta
from tetrad.server.stream.session import Delta

Kind = Literal["reasoning", "text", "tool"]


@dataclass(slots=True)
class Block:
    """One block, as far as it has come."""

    index: int
    """Its place in the answer."""
    kind: Kind
    block_id: str
    call_id: str = ""
    name: str = ""
    """Of the tool that is called."""
    pieces: list[str] = field(default_factory=list)
    is_cut: bool = False
    """Whether it ended before it was whole."""

    @property
    def text(self) -> str:
        """What it says; of a tool call the JSON of its arguments."""
        return "".join(self.pieces)

    @property
    def arguments(self) -> Any:
        """Of a tool call; None if it was cut off."""
        try:
            return msgspec.json.decode(self.text)
        except msgspec.DecodeError:
            return None


class BlockEvent(NamedTuple):
    """What happens to a block."""

    phase: Literal["start", "more", "stop"]
    block: Block
    text: str = ""
    """What "more" adds."""


def block_id(prefix: str) -> str:
    """A name nobody else has, such as msg_0123456789abcdef…"""
    return f"{prefix}_{uuid.uuid4().hex}"


_PREFIXES: dict[Kind, str] = {"reasoning": "rs", "text": "msg", "tool": "fc"}


class BlockReader:
    """Feed the deltas of one choice, get events. `blocks` are all blocks so far."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None

    def feed(self, delta: Delta) -> Iterator[BlockEvent]:
        """What `delta` adds; the last one closes the last block."""
        if delta.reasoning:
            yield from self._add("reasoning", delta.reasoning)
        # What is left of a call comes before the content behind it.
        calls = iter(delta.tool_calls)
        call = next(calls, None)
        while call is not None and call.name is None:
            yield from self._add("tool", call.arguments)
            call = next(calls, None)
        if delta.content:
            yield from self._add("text", delta.content)
        while call is not None:
            yield from self._call(call)
            call = next(calls, None)
        if delta.finish is not None:
            if self._open is not None:
                self._open.is_cut = delta.finish.reason in ("length", "abort")
            yield from self._close()

    def _call(self, piece: ToolDelta) -> Iterator[BlockEvent]:
        if piece.name is not None:
            yield from self._start("tool", piece.call_id or "", piece.name)
        yield from self._add("tool", piece.arguments)

    def _add(self, kind: Kind, text: str) -> Iterator[BlockEvent]:
        if self._open is None or self._open.kind != kind:
            yield from self._start(kind)
        assert self._open is not None
        if text:
            self._open.pieces.append(text)
            yield BlockEvent("more", self._open, text)

    def _start(self, kind: Kind, call_id: str = "", name: str = "") -> Iterator[BlockEvent]:
        yield from self._close()
        self._open = Block(len(self.blocks), kind, block_id(_PREFIXES[kind]), call_id, name)
        self.blocks.append(self._open)
        yield BlockEvent("start", self._open)

    def _close(self) -> Iterator[BlockEvent]:
        if self._open is not None:
            closed, self._open = self._open, None
            yield BlockEvent("stop", closed)
