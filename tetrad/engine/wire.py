"""Messages as bytes: a frame with the class name, a frame with the msgpack body."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from tetrad.core.messages import MESSAGES, Message, StepOutputs

INBOX = "to-engine"
"""Begins the name of a socket file inside the private folder that all processes know: of the
messages of one worker."""
OUTBOX = "to-api"
"""The same of the engine's messages to it."""

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


def plain_tokens(message: StepOutputs) -> Iterator[tuple[int, int]]:
    """(number of a request, its next token) of what came in columns. Raises ValueError if they do
    not fit."""
    numbers, tokens = memoryview(message.numbers), memoryview(message.tokens)
    if len(numbers) != len(tokens) or len(numbers) % 4:
        raise ValueError(f"columns of {len(numbers)} and {len(tokens)} bytes")
    return zip(numbers.cast("I"), tokens.cast("i"), strict=True)


def address(folder: str, box: str, worker: int) -> str:
    """ZeroMQ endpoint of one of the two sockets of a worker, which binds both."""
    return f"ipc://{folder}/{box}-{worker}"
