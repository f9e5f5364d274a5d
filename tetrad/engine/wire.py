"""Messages as bytes: a frame with the class name, a frame with the msgpack body."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tetrad.core.messages import MESSAGES, Message

INBOX = "to-engine"
"""Socket file of the API's messages, inside the private folder both processes know."""
OUTBOX = "to-api"
"""Socket file of the engine's messages."""

_encoder = msgspec.msgpack.Encoder()
_decoders = {name: msgspec.msgpack.Decoder(cls) for name, cls in MESSAGES.items()}


def encode(message: Message) -> list[bytes]:
    """Two frames for `send_multipart`."""
    return [type(message).__name__.encode(), _encoder.encode(message)]


def decode(frames: Sequence[bytes]) -> Message:
    """Inverse of `encode`. Raises ValueError for anything that is not a message of ours."""
    name = frames[0].decode("ascii", "replace")
    if len(frames) != 2 or name not in _decoders:
        raise ValueError(f"not a message: {len(frames)} frames, the first says {name!r}")
    message: Message = _decoders[name].decode(frames[1])
    return message


def address(folder: str, socket: str) -> str:
    """ZeroMQ endpoint of one of the two sockets."""
    return f"ipc://{folder}/{socket}"
