"""HTTP/1.1 as a client writes and reads it: requests, heads of answers, chunked bodies.

Source: RFC 9112, sections 4 (status line), 6 (message body) and 7.1 (chunked transfer coding).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from tetrad.core.errors import ConfigError

MOST_HEAD_BYTES = 2**17
MOST_LINE_BYTES = 2**13
END_OF_HEAD = b"\r\n\r\n"
STATUS_LINE = re.compile(rb"HTTP/1\.([01]) (\d{3})(?: [^\r\n]*)?")
CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?", re.DOTALL)


PLAIN_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})\r\n")


class BadAnswerError(ValueError):
    """The bytes are no HTTP/1.1 answer; the text says what is wrong with them."""


@dataclass(frozen=True, slots=True)
class Head:
    """What the head of an answer says about its body."""

    status: int
    content_type: str
    """Without parameters, in small letters; "" when there is none."""
    is_chunked: bool
    length: int | None
    """Bytes of the body; None when chunks or the end of the connection end it."""
    is_kept: bool
    """Whether the connection may carry another request."""
    num_bytes: int
    """Length of this head, its empty line included."""


def read_head(read: bytes) -> Head | None:
    """The head at the start of `read`; None while it is not whole. Interim answers (1xx) in front
    of it are passed over. Raises BadAnswerError."""
    start = 0
    while True:
        end = read.find(END_OF_HEAD, start)
        if end < 0:
            if len(read) > MOST_HEAD_BYTES:
                raise BadAnswerError(f"a head of more than {MOST_HEAD_BYTES} bytes")
            return None
        head = _parsed(read[start:end], end + len(END_OF_HEAD))
        if head.status >= 200:
            return head
        start = head.num_bytes


def _parsed(block: bytes, num_bytes: int) -> Head:
    first, *lines = block.split(b"\r\n")
    status = STATUS_LINE.fullmatch(first)
    if status is None:
        raise BadAnswerError(f"an answer that begins with {first[:80]!r}")
    fields = {}
    for line in lines:
        name, _, value = line.partition(b":")
        fields[name.strip().lower()] = value.strip().lower()
    said = fields.get(b"content-length")
    if said is not None and not said.isdigit():
        raise BadAnswerError(f"content-length {said[:80]!r}")
    is_chunked = b"chunked" in fields.get(b"transfer-encoding", b"")
    code = int(status[2])
    length = None if is_chunked or said is None else int(said)
    is_bodiless = code in (204, 304)
    wish = fields.get(b"connection", b"close" if status[1] == b"0" else b"")
    return Head(
        status=code,
        content_type=fields.get(b"content-type", b"").partition(b";")[0].strip().decode("latin-1"),
        is_chunked=is_chunked and not is_bodiless,
        length=0 if is_bodiless else length,
        is_kept=b"close" not in wish and (is_chunked or length is not None or is_bodiless),
        num_bytes=num_bytes,
    )


class Chunks:
    """Takes the framing of a chunked body away, whatever the reads cut in two."""

    def __init__(self) -> None:
        self.is_done = False
        self._line = b""
        self._left = 0
        self._expects = "size"

    def feed(self, read: bytes) -> bytes:
        """The payload in `read`. Raises BadAnswerError."""
        if self._expects == "size" and not self._line and (whole := _one_chunk(read)) is not None:
            return whole
        parts, at = [], 0
        while at < len(read) and not self.is_done:
            if self._left:
                parts.append(read[at : at + self._left])
                at += len(parts[-1])
                self._left -= len(parts[-1])
                continue
            end = read.find(b"\n", at)
            if end < 0:
                self._line += read[at:]
                if len(self._line) > MOST_LINE_BYTES:
                    raise BadAnswerError("a chunk whose size has no end")
                break
            self._take((self._line + read[at:end]).removesuffix(b"\r"))
            self._line, at = b"", end + 1
        return b"".join(parts)

    def _take(self, line: bytes) -> None:
        if self._expects == "trailer":
            self.is_done = not line
        elif self._expects == "gap":
            if line:
                raise BadAnswerError(f"a chunk that is longer than it says, at {line[:80]!r}")
            self._expects = "size"
        else:
            size = CHUNK_SIZE.fullmatch(line)
            if size is None:
                raise BadAnswerError(f"a chunk of size {line[:80]!r}")
            self._left = int(size[1], 16)
            self._expects = "gap" if self._left else "trailer"


def _one_chunk(read: bytes) -> bytes | None:
    """The payload when `read` is one whole chunk, as nearly all are; None when it is not."""
    size = PLAIN_SIZE.match(read)
    if size is None:
        return None
    end = size.end() + int(size[1], 16)
    is_whole = end > size.end() and len(read) == end + 2 and read.endswith(b"\r\n")
    return read[size.end() : end] if is_whole else None


def address(url: str) -> SplitResult:
    """The parts of a server's address. Raises ConfigError for what is none."""
    parts = urlsplit(url)
    try:
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_right = False
    if not is_right:
        raise ConfigError(f"{url!r} is no address of a server; give one such as http://host:30000.")
    return parts


def request_head(parts: SplitResult, path: str, headers: Mapping[str, str]) -> bytes:
    """Everything of a POST but the length of its body: `with_body` adds both."""
    host = parts.netloc.rpartition("@")[2]
    fields = {
        "Host": host,
        "Accept": "*/*",
        "User-Agent": "tetrad",
        "Content-Type": "application/json",
        **headers,
    }
    for name, value in fields.items():
        if re.search(r"[\r\n\0]", name + value):
            raise ConfigError(f"header {name!r} must not hold the end of a line.")
    lines = [f"POST {parts.path}{path} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    return "\r\n".join(lines).encode()


def with_body(head: bytes, body: bytes) -> bytes:
    """The request as it goes out."""
    return b"%b\r\nContent-Length: %d\r\n\r\n%b" % (head, len(body), body)
