"""Reasoning apart from the answer, in a text that arrives in pieces.

    reasoning…</think>answer          when the prompt ended with <think>, or DeepSeek-R1 writes
    <think>reasoning…</think>answer   when the model opens it itself
    reasoning…<tool_call>…            a tool call ends GLM's reasoning as well

White space around the markers belongs to the format, not to the reasoning or the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tetrad.server.parsers.markers import first_marker, held_suffix

OPEN, CLOSE, TOOL_CALL = "<think>", "</think>", "<tool_call>"
MARKERS = (OPEN, CLOSE)

Piece = tuple[Literal["reasoning", "content"], str]


Start = Literal["inside", "after", "undecided"]
"""Where an output begins; undecided: the model may open the reasoning itself."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """One of SGLang's `--reasoning-parser`."""

    call_ends: bool = False
    """Does a tool call end the reasoning?"""
    is_forced: bool = False
    """Does every output begin inside the reasoning, unless the prompt has closed it?"""

    def start(self, prompt: str) -> Start:
        """Where the output of this rendered prompt begins."""
        end = prompt.rstrip()
        if end.endswith(CLOSE):
            return "after"
        return "inside" if end.endswith(OPEN) or self.is_forced else "undecided"


REASONING_FORMATS = {
    "glm45": ReasoningFormat(call_ends=True),
    "deepseek-r1": ReasoningFormat(is_forced=True),
    "qwen3": ReasoningFormat(),
}


def guessed_format(template: str) -> str | None:
    """By what a chat template writes; None if it writes no reasoning that is known."""
    if OPEN not in template and CLOSE not in template:
        return None
    return "glm45" if "<arg_key>" in template else "qwen3"


class ReasoningParser:
    """Feed text, get pieces of reasoning and content in order."""

    def __init__(self, form: ReasoningFormat, start: Start) -> None:
        self._ends = (CLOSE, TOOL_CALL) if form.call_ends else (CLOSE,)
        self._phase: Start = start
        self._may_repeat_open = form.is_forced and start == "inside"
        self._buffer = ""
        self._skip_space = start == "inside"

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
        if self._phase == "inside" and not self._waits_for_open():
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

    def _waits_for_open(self) -> bool:
        """The model may open what is open already: that marker is dropped."""
        if self._may_repeat_open:
            text = self._buffer.lstrip()
            if not text.startswith(OPEN) and OPEN.startswith(text):
                return True
            self._may_repeat_open = False
            if text.startswith(OPEN):
                self._buffer = text.removeprefix(OPEN)
        return False

    def _reasoning(self) -> list[Piece]:
        found = first_marker(self._buffer, self._ends)
        if found is None:
            held = held_suffix(self._buffer, self._ends)
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
