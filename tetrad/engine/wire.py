"""Encoding of messages."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from operator import or_
from typing import cast

import msgspec

from tetrad.core.messages import Message, StepOutputs
from tetrad.core.request import Request

INBOX = "to-engine"
"""Begins the name of a socket file inside the private folder that all processes know: of the
messages of one worker."""
OUTBOX = "to-api"
"""The same of the engine's messages to it."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(reduce(or_, Message.__subclasses__()))


def encode(message: Message) -> bytes:
    """As it travels."""
    return _encoder.encode(message)


def encoded(request: Request) -> Request:
    """For a message to be encoded: one that cannot be fails here, alone."""
    return cast(Request, msgspec.Raw(_encoder.encode(request)))


def decode(frame: bytes) -> Message:
    """Inverse of `encode`. Raises ValueError for anything that is not a message of ours."""
    try:
        message: Message = _decoder.decode(frame)
    except msgspec.DecodeError as error:
        raise ValueError(f"not a message: {error}") from None
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
