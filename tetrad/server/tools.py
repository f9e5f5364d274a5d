"""Tool calls in a text that arrives in pieces (GLM-4.7 and later).

    <tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>…</tool_call>

A call is announced once its name and first argument key are whole, and its arguments are streamed
as the JSON they stand for. Text that turns out not to be a call before it was announced becomes
content as it was written; a call that breaks off later keeps the arguments it had, and the rest
becomes content. White space around calls belongs to the format and is dropped.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tetrad.server.markers import first_marker, held_suffix
from tetrad.server.tool_schema import argument_kinds, as_json, quoted

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY_OPEN, KEY_CLOSE = "<arg_key>", "</arg_key>"
VALUE_OPEN, VALUE_CLOSE = "<arg_value>", "</arg_value>"
MARKERS = (OPEN, CLOSE, KEY_OPEN, KEY_CLOSE, VALUE_OPEN, VALUE_CLOSE)

_NAME = re.compile(r"[\w.:/-]{1,256}")
_MAX_KEY_CHARACTERS = 512
"""A longer one is not a key: what waits undecided stays small."""


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
    """Feed text, get content and tool-call pieces in order."""

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
        self._name = ""
        self._key = ""
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
        elif self._state == self._string_value:
            self._arguments(events, quoted(self._buffer)[1:-1])
        self._buffer = self._raw = ""
        return events

    # Each state below consumes from the buffer; it returns False when it needs more text.

    def _content(self, events: list[Event]) -> bool:
        at = self._buffer.find(OPEN)
        if at < 0:
            certain = self._buffer[: len(self._buffer) - held_suffix(self._buffer, (OPEN,))]
            self._emit_content(events, self._take(len(certain.rstrip())))
            return False
        before = len(self._buffer[:at].rstrip())
        self._emit_content(events, self._take(before))
        self._raw = self._take(at - before + len(OPEN))
        self._announced = False
        self._num_arguments = 0
        self._state = self._header
        return True

    def _header(self, events: list[Event]) -> bool:
        """Name of the function, up to the first argument or the end of a call without any."""
        found = first_marker(self._buffer, (KEY_OPEN, CLOSE))
        if found is None:
            known = self._buffer[: len(self._buffer) - held_suffix(self._buffer, (KEY_OPEN, CLOSE))]
            name = known.strip()
            return bool(name) and not self._may_be_name(name) and self._give_up(events)
        at, marker = found
        self._name = self._buffer[:at].strip()
        if not self._may_be_name(self._name):
            return self._give_up(events)
        self._raw += self._take(at + len(marker))
        if marker == CLOSE:
            self._announce(events)
            return self._end_call(events)
        self._state = self._argument_key
        return True

    def _argument_key(self, events: list[Event]) -> bool:
        found = first_marker(self._buffer, (VALUE_OPEN, CLOSE, OPEN))
        if found is None:
            held = held_suffix(self._buffer, (VALUE_OPEN, CLOSE, OPEN))
            is_too_long = len(self._buffer) - held > _MAX_KEY_CHARACTERS
            return is_too_long and self._give_up(events)
        at, marker = found
        key, closed, between = self._buffer[:at].partition(KEY_CLOSE)
        is_key = closed and key.strip() and not between.strip() and at <= _MAX_KEY_CHARACTERS
        if marker != VALUE_OPEN or not is_key:
            return self._give_up(events)
        self._key = key.strip()
        self._raw += self._take(at + len(marker))
        self._begin_value(events)
        return True

    def _begin_value(self, events: list[Event]) -> None:
        if not self._announced:
            self._announce(events)
        before = ", " if self._num_arguments else "{"
        self._num_arguments += 1
        is_text = self._kinds() == {"string"}
        self._arguments(events, f"{before}{quoted(self._key)}: " + ('"' if is_text else ""))
        self._scanned = 0
        self._state = self._string_value if is_text else self._json_value

    def _string_value(self, events: list[Event]) -> bool:
        found = first_marker(self._buffer, (VALUE_CLOSE, CLOSE))
        if found is None:
            held = held_suffix(self._buffer, (VALUE_CLOSE, CLOSE))
            self._arguments(events, quoted(self._take(len(self._buffer) - held))[1:-1])
            return False
        at, marker = found
        self._arguments(events, quoted(self._take(at))[1:-1] + '"')
        return self._end_value(events, marker)

    def _json_value(self, events: list[Event]) -> bool:
        """Numbers, objects and so on: only the whole value shows whether it is JSON."""
        found = first_marker(self._buffer, (VALUE_CLOSE, CLOSE), self._scanned)
        if found is None:
            self._scanned = len(self._buffer) - held_suffix(self._buffer, (VALUE_CLOSE, CLOSE))
            return False
        at, marker = found
        self._arguments(events, as_json(self._take(at), self._kinds()))
        return self._end_value(events, marker)

    def _end_value(self, events: list[Event], marker: str) -> bool:
        """A call may end inside a value: the value's own end is then understood."""
        if marker == CLOSE:
            self._take(len(CLOSE))
            return self._end_call(events)
        self._take(len(VALUE_CLOSE))
        self._raw = ""
        self._state = self._between_arguments
        return True

    def _between_arguments(self, events: list[Event]) -> bool:
        text = self._buffer.lstrip()
        for marker, state in ((KEY_OPEN, self._argument_key), (CLOSE, None)):
            if text.startswith(marker):
                self._buffer = text.removeprefix(marker)
                if state is None:
                    return self._end_call(events)
                self._raw = marker
                self._state = state
                return True
        waiting = KEY_OPEN.startswith(text) or CLOSE.startswith(text)
        return not waiting and self._give_up(events)

    def _announce(self, events: list[Event]) -> None:
        self._announced = True
        events.append(ToolDelta(self.num_calls, "", self._new_call_id(), self._name))
        self.num_calls += 1

    def _arguments(self, events: list[Event], text: str) -> None:
        if text:
            events.append(ToolDelta(self.num_calls - 1, text))

    def _end_call(self, events: list[Event]) -> bool:
        self._arguments(events, "}" if self._num_arguments else "{}")
        self._leave_call()
        self._after_call = True
        return True

    def _give_up(self, events: list[Event]) -> bool:
        """This is no call, or no longer one: what is not part of it is content."""
        if self._announced:
            self._arguments(events, "}")
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

    def _kinds(self) -> frozenset[str]:
        return argument_kinds(self._parameters.get(self._name), self._key)

    @staticmethod
    def _may_be_name(name: str) -> bool:
        return _NAME.fullmatch(name) is not None
