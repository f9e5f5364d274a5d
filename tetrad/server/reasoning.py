"""Reasoning apart from the answer, in a text that arrives in pieces (GLM-4.5 and later).

    reasoning…</think>answer          when the prompt ended with <think>
    <think>reasoning…</think>answer   when the model opens it itself
    reasoning…<tool_call>…            a tool call ends the reasoning as well

White space around the markers belongs to the format, not to the reasoning or the answer.
"""

from __future__ import annotations

from typing import Literal

from tetrad.server.markers import first_marker, held_suffix

OPEN, CLOSE, TOOL_CALL = "<think>", "</think>", "<tool_call>"
MARKERS = (OPEN, CLOSE)

Piece = tuple[Literal["reasoning", "content"], str]


def starts_inside(prompt: str) -> bool:
    """Whether the output of this rendered prompt begins inside the reasoning."""
    return prompt.rstrip().endswith(OPEN)


class ReasoningParser:
    """Feed text, get pieces of reasoning and content in order."""

    def __init__(self, *, inside: bool) -> None:
        self._phase: Literal["undecided", "inside", "after"] = "inside" if inside else "undecided"
        self._buffer = ""
        self._skip_space = inside

    @property
    def inside(self) -> bool:
        """Whether the text read so far ends within the reasoning."""
        return self._phase == "inside"

    def feed(self, text: str) -> list[Piece]:
        """Pieces that `text` makes certain."""
        self._buffer += text
        pieces: list[Piece] = []
        if self._phase == "undecided":
            self._decide()
        if self._phase == "inside":
            pieces += self._reasoning()
        if self._phase == "after":
            pieces += self._take("content", len(self._buffer))
        return pieces

    def finish(self) -> list[Piece]:
        """The text ended: what was held back, as what it would have been."""
        return self._take("reasoning" if self.inside else "content", len(self._buffer))

    def _decide(self) -> None:
        """The model may open the reasoning itself; anything else is content from the start."""
        text = self._buffer.lstrip()
        if text.startswith(OPEN):
            self._enter("inside", text[len(OPEN) :])
        elif not OPEN.startswith(text):
            self._phase = "after"

    def _reasoning(self) -> list[Piece]:
        found = first_marker(self._buffer, (CLOSE, TOOL_CALL))
        if found is None:
            held = held_suffix(self._buffer, (CLOSE, TOOL_CALL))
            return self._take("reasoning", len(self._buffer) - held)
        at, marker = found
        pieces = self._take("reasoning", at)
        self._enter("after", self._buffer.removeprefix(CLOSE) if marker == CLOSE else self._buffer)
        return pieces

    def _enter(self, phase: Literal["inside", "after"], rest: str) -> None:
        self._phase = phase
        self._buffer = rest
        self._skip_space = True

    def _take(self, kind: Literal["reasoning", "content"], length: int) -> list[Piece]:
        piece, self._buffer = self._buffer[:length], self._buffer[length:]
        if self._skip_space:
            piece = piece.lstrip()
            self._skip_space = not piece
        return [(kind, piece)] if piece else []
