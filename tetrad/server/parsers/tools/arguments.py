"""What formats have in common in which each argument of a call stands between its own markers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from tetrad.server.parsers.markers import first_marker, held_suffix
from tetrad.server.parsers.tools.events import Event, ToolParser, new_call_id
from tetrad.server.parsers.tools.schema import quoted


class ArgumentsParser(ToolParser):
    """Reads the values: a string is streamed as it comes, anything else once it is whole."""

    ends: ClassVar[tuple[str, ...]]
    """Markers that end a value."""

    def __init__(
        self, tools: Sequence[dict[str, Any]], call_id: Callable[[], str] = new_call_id
    ) -> None:
        super().__init__(tools, call_id)
        self._key = ""

    def _broke_off(self, events: list[Event]) -> None:
        if self._state == self._string_value:
            self._arguments(events, quoted(self._buffer)[1:-1])

    def _end_value(self, events: list[Event], marker: str) -> bool:
        """The state after a value; the buffer begins with `marker`, which ended it."""
        raise NotImplementedError

    def _begin_value(self, events: list[Event], *, is_text: bool) -> None:
        """`is_text`: what follows is the string itself, not JSON."""
        self._begin_argument(events, self._key, '"' if is_text else "")
        self._state = self._string_value if is_text else self._json_value

    def _string_value(self, events: list[Event]) -> bool:
        found = first_marker(self._buffer, self.ends)
        if found is None:
            held = held_suffix(self._buffer, self.ends)
            self._arguments(events, quoted(self._take(len(self._buffer) - held))[1:-1])
            return False
        at, marker = found
        self._arguments(events, quoted(self._take(at))[1:-1] + '"')
        return self._end_value(events, marker)

    def _json_value(self, events: list[Event]) -> bool:
        """Numbers, objects and so on: only the whole value shows whether it is JSON."""
        found = first_marker(self._buffer, self.ends, self._scanned)
        if found is None:
            self._scanned = len(self._buffer) - held_suffix(self._buffer, self.ends)
            return False
        at, marker = found
        self._arguments(events, self._as_json(self._take(at), self._key))
        return self._end_value(events, marker)
