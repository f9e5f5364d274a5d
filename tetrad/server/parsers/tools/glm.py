"""Tool calls of GLM-4.5 and later, in a text that arrives in pieces.

    <tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>…</tool_call>

A call is certain once its name and first argument key are whole. GLM-4.5 writes newlines between
the markers, later ones none; both are read.
"""

from __future__ import annotations

from tetrad.server.parsers.markers import first_marker, held_suffix
from tetrad.server.parsers.tools.arguments import ArgumentsParser
from tetrad.server.parsers.tools.events import Event

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY_OPEN, KEY_CLOSE = "<arg_key>", "</arg_key>"
VALUE_OPEN, VALUE_CLOSE = "<arg_value>", "</arg_value>"

_MAX_KEY_CHARACTERS = 512
"""A longer one is not a key: what waits undecided stays small."""


class GlmParser(ArgumentsParser):
    """Formats glm45 and glm47."""

    open = OPEN
    markers = (OPEN, CLOSE, KEY_OPEN, KEY_CLOSE, VALUE_OPEN, VALUE_CLOSE)
    ends = (VALUE_CLOSE, CLOSE)

    def _first(self, events: list[Event]) -> bool:
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
        if not self._announced:
            self._announce(events)
        is_text = self._kinds(self._key) == {"string"} and not self._choices(self._key)
        self._begin_value(events, is_text=is_text)
        return True

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

    def _end_call(self, events: list[Event]) -> bool:
        self._arguments(events, "}" if self._num_arguments else "{}")
        self._leave_call()
        self._after_call = True
        return True
