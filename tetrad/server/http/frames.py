"""What an API process and the annex say to each other: one ASGI conversation on one connection.

    API process                  annex
         ←  Ready                it has taken the connection
         →  Head                 method, path, headers
         ←  Ask                  its application called `receive`
         →  Piece, or Gone       of the body; or the client has left
         ←  Start, Piece ...     the answer, up to the piece that has no more behind it

A piece is sent when it was asked for, so that of a body no more is under way than one, and of one
that is refused by its head nothing. A frame is its length in four bytes, and msgpack.
"""

from __future__ import annotations

import asyncio

import msgspec

LENGTH_BYTES = 4
Headers = list[tuple[bytes, bytes]]


class Frame(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One of those below."""


class Ready(Frame, frozen=True):
    """Annex → API process: the request will be read."""


class Head(Frame, frozen=True):
    """API process → annex: the scope of the request."""

    began_at: float
    """By the machine's monotonic clock."""
    http_version: str
    method: str
    scheme: str
    path: str
    raw_path: bytes
    query_string: bytes
    headers: Headers
    client: tuple[str, int] | None
    server: tuple[str, int | None] | None


class Ask(Frame, frozen=True):
    """Annex → API process: the next of the body, or the news that the client has left."""


class Piece(Frame, frozen=True):
    """Either way: of a body."""

    content: bytes
    has_more: bool


class Gone(Frame, frozen=True):
    """API process → annex: the client has left."""


class Start(Frame, frozen=True):
    """Annex → API process: the answer begins."""

    status: int
    headers: Headers


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Ready | Head | Ask | Piece | Gone | Start] = (
    msgspec.msgpack.Decoder(Ready | Head | Ask | Piece | Gone | Start)
)


class Line:
    """One end of a connection. Its methods raise ConnectionError when the other end is gone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._num_bytes: int | None = None
        """Of the frame that comes; kept, so that who no longer waits for it does not lose it."""

    async def hear(self) -> Frame:
        """The next frame."""
        try:
            if self._num_bytes is None:
                length = await self._reader.readexactly(LENGTH_BYTES)
                self._num_bytes = int.from_bytes(length, "big")
            raw = await self._reader.readexactly(self._num_bytes)
        except asyncio.IncompleteReadError:
            raise ConnectionResetError("The other process has closed the connection.") from None
        self._num_bytes = None
        return _decoder.decode(raw)

    async def say(self, frame: Frame) -> None:
        """Send a frame; waits while much is under way."""
        raw = bytearray(LENGTH_BYTES)
        _encoder.encode_into(frame, raw, LENGTH_BYTES)
        raw[:LENGTH_BYTES] = (len(raw) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "big")
        self._writer.write(raw)
        await self._writer.drain()

    def close(self) -> None:
        """What was said before is still sent."""
        self._writer.close()
