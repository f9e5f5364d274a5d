"""What the first API process tells a further one: lines of JSON on its standard input."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec

READ_BYTES = 1 << 16


class Begin(msgspec.Struct, tag=True):
    """The first line: what is served. It holds the key, which no command line may."""

    config_json: str
    command: list[str]
    """How the server was started."""
    started_at: float
    num_workers: int
    annex: str
    """Where requests with large bodies are handed over; empty if nowhere."""


class Join(msgspec.Struct, tag=True):
    """The engine is ready, and knows the process by this number: serve."""

    folder: str
    worker: int


class BeReady(msgspec.Struct, tag=True):
    """All processes serve: say so."""

    startup_s: float


class Drain(msgspec.Struct, tag=True):
    """Take no new requests."""


class Fail(msgspec.Struct, tag=True):
    """The engine has died."""

    reason: str


class End(msgspec.Struct, tag=True):
    """Close the connections and exit."""


Order = Begin | Join | BeReady | Drain | Fail | End

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)


def line(order: Order) -> bytes:
    """An order as it is sent."""
    return _encoder.encode(order) + b"\n"


def orders(descriptor: int) -> Iterator[Order]:
    """Orders as they come; ends when the sender is gone. Blocks in between."""
    rest = b""
    while piece := os.read(descriptor, READ_BYTES):
        *lines, rest = (rest + piece).split(b"\n")
        yield from map(_decoder.decode, lines)
