"""What readers of tool calls have in common, whatever the format: text in, events out.

A call is announced once it is certain to be one, and its arguments are streamed as the JSON they
stand for. Text that turns out not to be a call before it was announced becomes content as it was
written; a call that breaks off later keeps the arguments it had, and the rest becomes content.
White space around calls belongs to the format and is dropped.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tetrad.server.parsers.markers import held_suffix
from tetrad.server.parsers.tools.schema import argument_choices, argument_kinds, as_json, quoted

_NAME = re.compile(r"[\w.:/-]{1,256}")


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """A piece of a tool call. The first piece of a call has `call_id` and `name`."""

    index: int
    """Number of the call within the answer, from 0."""
    arguments: str
    """More of the JSON text of the arguments."""
    call_id: str | None = None
    name: str | None = None


Event = str | ToolDelta
"""Content is a str."""


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class ToolParser:
    """Feed text, get content and tool-call pieces in order. A format is a subclass with states.

    A state is a method that consumes from `_buffer` and sets the next one; it returns False when it
    needs more text.
    """

    open: ClassVar[str]
    """Marker before a call, or before several."""
    markers: ClassVar[tuple[str, ...]]
    """All markers; the first character of each is its only "<"."""

    def __init__(
        self, tools: Sequence[dict[str, Any]], call_id: Callable[[], str] = new_call_id
    ) -> None:
        """`tools`: as in the request, {"type": "function", "function": {...}}."""
        functions = [tool["function"] for tool in tools]
        self._parameters = {f["name"]: f.get("parameters") for f in functions}
        self._new_call_id = call_id
        self._state: Callable[[list[Event]], bool] = self._content
        self._buffer = ""
        self._scanned = 0
        self._raw = ""
        """What was read of a call that may turn out not to be one."""
        self._name = ""
        self._announced = False
        self._num_arguments = 0
        self._after_call = False
        self.num_calls = 0
        """Calls announced so far."""

    def feed(self, text: str) -> list[Event]:
        """Events that `text` makes certain."""
        self._buffer += text
        events: list[Event] = []
        while self._state(events):
            pass
        return events

    def finish(self) -> list[Event]:
        """The text ended. A call that was never announced becomes content."""
        events: list[Event] = []
        if self._state == self._content or not self._announced:
            self._emit_content(events, self._raw + self._buffer)
        else:
            self._broke_off(events)
        self._buffer = self._raw = ""
        return events

    def _first(self, events: list[Event]) -> bool:
        """The state after `open`."""
        raise NotImplementedError

    def _broke_off(self, events: list[Event]) -> None:
        """The text ended within a call that was announced."""

    def _content(self, events: list[Event]) -> bool:
        at = self._buffer.find(self.open)
        if at < 0:
            certain = self._buffer[: len(self._buffer) - held_suffix(self._buffer, (self.open,))]
            self._emit_content(events, self._take(len(certain.rstrip())))
            return False
        before = len(self._buffer[:at].rstrip())
        self._emit_content(events, self._take(before))
        self._raw = self._take(at - before + len(self.open))
        self._announced = False
        self._num_arguments = 0
        self._state = self._first
        return True

    def _begin_argument(self, events: list[Event], key: str, start: str = "") -> None:
        """`start`: of the value."""
        before = ", " if self._num_arguments else "{"
        self._num_arguments += 1
        self._arguments(events, f"{before}{quoted(key)}: {start}")
        self._scanned = 0

    def _announce(self, events: list[Event]) -> None:
        self._announced = True
        self._num_arguments = 0
        events.append(ToolDelta(self.num_calls, "", self._new_call_id(), self._name))
        self.num_calls += 1

    def _arguments(self, events: list[Event], text: str) -> None:
        if text:
            events.append(ToolDelta(self.num_calls - 1, text))

    def _give_up(self, events: list[Event]) -> bool:
        """This is no call, or no longer one: what is not part of it is content."""
        if self._announced:
            self._arguments(events, "}" if self._num_arguments else "{}")
        self._emit_content(events, self._raw)
        self._leave_call()
        return True

    def _leave_call(self) -> None:
        self._raw = ""
        self._announced = False
        self._state = self._content

    def _emit_content(self, events: list[Event], text: str) -> None:
        if self._after_call:
            text = text.lstrip()
        if text:
            self._after_call = False
            events.append(text)

    def _take(self, length: int) -> str:
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        return taken

    def _kinds(self, key: str) -> frozenset[str]:
        return argument_kinds(self._parameters.get(self._name), key)

    def _choices(self, key: str) -> list[Any]:
        return argument_choices(self._parameters.get(self._name), key)

    def _as_json(self, text: str, key: str) -> str:
        """The value of an argument. One of those that its schema lists may have white space around
        it."""
        if (bare := text.strip()) != text and bare in self._choices(key):
            text = bare
        return as_json(text, self._kinds(key))

    @staticmethod
    def _may_be_name(name: str) -> bool:
        return _NAME.fullmatch(name) is not None
