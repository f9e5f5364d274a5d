"""Tool calls as JSON between markers (Hermes, Qwen 2.5 and 3), in a text that arrives in pieces.

    <tool_call>
    {"name": NAME, "arguments": {…}}
    </tool_call>

A call is certain once its name is whole and its arguments begin, as models write it; written in
another order, once all of it is there. Arguments are passed on as they are, up to the brace that
closes them; but for control characters in strings, which JSON wants escaped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tetrad.server.parsers.tools.events import Event, ToolParser, new_call_id
from tetrad.server.parsers.tools.schema import quoted

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_HEADER = re.compile(
    r'\s*\{\s*"name"\s*:\s*"([\w.:/-]{1,256})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_SIGN = re.compile(r'["\\{}\x00-\x1f]')


class JsonParser(ToolParser):
    """Formats hermes and qwen."""

    open = OPEN
    markers = (OPEN, CLOSE)

    def __init__(
        self, tools: Sequence[dict[str, Any]], call_id: Callable[[], str] = new_call_id
    ) -> None:
        super().__init__(tools, call_id)
        self._depth = 0
        self._is_quoted = False

    def _broke_off(self, events: list[Event]) -> None:
        if self._state == self._inside_arguments:
            self._arguments(events, self._buffer)

    def _first(self, events: list[Event]) -> bool:
        if found := _HEADER.match(self._buffer):
            self._name = found[1]
            self._take(found.end())
            self._raw = ""
            self._announce(events)
            self._depth, self._is_quoted = 0, False
            self._state = self._inside_arguments
            return True
        begun = self._buffer.lstrip()
        if begun and not begun.startswith("{"):
            return self._give_up(events)
        at = self._buffer.find(CLOSE)
        if at < 0:
            return False
        return self._whole_call(events, self._buffer[:at])

    def _whole_call(self, events: list[Event], text: str) -> bool:
        """A call whose parts come in another order, or no call."""
        try:
            call = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError):
            return self._give_up(events)
        name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
        is_call = isinstance(name, str) and self._may_be_name(name) and isinstance(arguments, dict)
        if not is_call:
            return self._give_up(events)
        self._name = name
        self._announce(events)
        self._arguments(events, msgspec.json.encode(arguments).decode())
        self._take(len(text) + len(CLOSE))
        return self._end_call()

    def _inside_arguments(self, events: list[Event]) -> bool:
        at = 0
        while found := _SIGN.search(self._buffer, at):
            at = found.end()
            sign = found[0]
            if sign == "\\":
                if at == len(self._buffer):  # what it escapes is not there yet
                    at -= 1
                    break
                at += 1
            elif sign == '"':
                self._is_quoted = not self._is_quoted
            elif self._is_quoted:
                at = self._escape(found.start(), sign)
            elif sign in "{}":
                self._depth += 1 if sign == "{" else -1
                if self._depth == 0:
                    self._arguments(events, self._take(at))
                    self._state = self._rest
                    return True
        else:
            at = len(self._buffer)
        self._arguments(events, self._take(at))
        return False

    def _escape(self, at: int, sign: str) -> int:
        """A control character may not stand in a string as it is; returns where to go on."""
        written = sign if sign in "{}" else quoted(sign)[1:-1]
        self._buffer = f"{self._buffer[:at]}{written}{self._buffer[at + 1 :]}"
        return at + len(written)

    def _rest(self, _events: list[Event]) -> bool:
        """What is left of a call after its arguments is not of interest: usually a brace."""
        text = self._buffer.lstrip()
        if text.startswith(","):
            at = text.find(CLOSE)
            self._buffer = text[at + len(CLOSE) :] if at >= 0 else text
            return at >= 0 and self._end_call()
        after = text[1:].lstrip() if text.startswith("}") else text
        if CLOSE.startswith(after) and after != CLOSE:
            return False
        self._buffer = after.removeprefix(CLOSE)
        return self._end_call()

    def _end_call(self) -> bool:
        self._leave_call()
        self._after_call = True
        return True
