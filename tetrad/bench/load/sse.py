"""Server-sent events from raw reads, whatever the reads cut in two.

Source: the WHATWG HTML standard, section "Server-sent events" (line ends, comments, fields).
"""

from __future__ import annotations

import re

LINE_END = re.compile(rb"\r\n|\n|\r")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventParser:
    """Feed it the bytes of a stream in order; it gives the data of each completed event."""

    def __init__(self) -> None:
        self._tail = b""
        self._data: list[bytes] = []
        self._at_start = True

    def feed(self, read: bytes) -> list[bytes]:
        """Return the data of every event that `read` completes."""
        # Nearly every read is one event of one line.
        if (
            read.find(b"\n") == len(read) - 2
            and read.startswith(b"data: ")
            and read.endswith(b"\n")
            and b"\r" not in read
            and not (self._at_start or self._tail or self._data)
        ):
            return [read[6:-2]]
        text = self._tail + read
        # The "\n" of a "\r\n" may come with the next read.
        held = b"\r" if text.endswith(b"\r") else b""
        *lines, rest = LINE_END.split(text[: len(text) - len(held)])
        self._tail = rest + held
        return [event for line in lines if (event := self._take(line)) is not None]

    def close(self) -> list[bytes]:
        """The stream ended: return an event that only lacked its empty line."""
        events = [self._take(self._tail.removesuffix(b"\r")), self._take(b"")]
        self._tail = b""
        return [event for event in events if event is not None]

    def _take(self, line: bytes) -> bytes | None:
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(BYTE_ORDER_MARK)
        if not line:
            data, self._data = self._data, []
            return b"\n".join(data) if data else None
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        return None
