"""Tool calls of DeepSeek-V3.2, in a text that arrives in pieces.

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="NAME">
    <｜DSML｜parameter name="K" string="true">V</｜DSML｜parameter>
    …
    </｜DSML｜invoke>
    …
    </｜DSML｜function_calls>

string="true" means that the value is a string, written verbatim; otherwise it is JSON. A call is
certain once its name is whole.
"""

from __future__ import annotations

import re

from tetrad.server.parsers.tools.arguments import ArgumentsParser
from tetrad.server.parsers.tools.events import Event

_D = "\uff5cDSML\uff5c"
OPEN, CLOSE = f"<{_D}function_calls>", f"</{_D}function_calls>"
INVOKE, INVOKE_CLOSE = f"<{_D}invoke", f"</{_D}invoke>"
PARAMETER, PARAMETER_CLOSE = f"<{_D}parameter", f"</{_D}parameter>"

_INVOKE = re.compile(INVOKE + r'\s{1,8}name="([\w.:/-]{1,256})"\s{0,8}>')
_PARAMETER = re.compile(
    PARAMETER + r'\s{1,8}name="([^">]{1,512})"(?:\s{1,8}string="(true|false)")?\s{0,8}>'
)
_MAX_TAG_CHARACTERS = 600
"""A longer one is no tag: what waits undecided stays small."""


class DsmlParser(ArgumentsParser):
    """Format deepseekv32."""

    open = OPEN
    markers = (OPEN, CLOSE, INVOKE, INVOKE_CLOSE, PARAMETER, PARAMETER_CLOSE)
    ends = (PARAMETER_CLOSE,)

    def _first(self, events: list[Event]) -> bool:
        """Between calls."""
        text = self._buffer.lstrip()
        if text.startswith(CLOSE):
            if self._raw:  # there was no call
                return self._give_up(events)
            self._buffer = text.removeprefix(CLOSE)
            self._leave_call()
            self._after_call = True
            return True
        found = self._tag(_INVOKE, INVOKE, text, also=CLOSE)
        if not isinstance(found, re.Match):
            return found and self._give_up(events)
        self._buffer = text[found.end() :]
        self._raw = ""
        self._name = found[1]
        self._announce(events)
        self._state = self._between_parameters
        return True

    def _between_parameters(self, events: list[Event]) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(INVOKE_CLOSE):
            self._buffer = text.removeprefix(INVOKE_CLOSE)
            self._arguments(events, "}" if self._num_arguments else "{}")
            self._announced = False
            self._after_call = True
            self._state = self._first
            return True
        found = self._tag(_PARAMETER, PARAMETER, text, also=INVOKE_CLOSE)
        if not isinstance(found, re.Match):
            return found and self._give_up(events)
        self._buffer = text[found.end() :]
        self._key = found[1]
        self._begin_value(events, is_text=found[2] == "true")
        return True

    def _end_value(self, _events: list[Event], marker: str) -> bool:
        self._take(len(marker))
        self._state = self._between_parameters
        return True

    @staticmethod
    def _tag(tag: re.Pattern[str], begin: str, text: str, also: str) -> re.Match[str] | bool:
        """The tag at the start of `text`; False if more text may make it one, or the marker `also`;
        True if not."""
        if found := tag.match(text):
            return found
        if begin.startswith(text) or also.startswith(text):
            return False
        may_grow = text.startswith(begin) and ">" not in text and len(text) <= _MAX_TAG_CHARACTERS
        return not may_grow
