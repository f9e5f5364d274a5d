"""JSON and server-sent events as bytes."""

from __future__ import annotations

from typing import Any

import msgspec

_encoder = msgspec.json.Encoder()

DONE = b"data: [DONE]\n\n"


def json_bytes(value: Any) -> bytes:
    """Compact UTF-8 JSON of plain data."""
    return _encoder.encode(value)


def event(value: Any) -> bytes:
    """One event; JSON never holds a raw newline, so it is one line."""
    return b"data: " + _encoder.encode(value) + b"\n\n"
