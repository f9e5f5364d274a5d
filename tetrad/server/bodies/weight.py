"""What a JSON text would cost to read, told before it is read.

Reading keeps the interpreter, and with it every stream of the process, until it is done: about
3 to 7 µs for an object, 0.1 to 0.2 µs for another value, 0.02 µs for an escape in a string and next
to nothing for another byte of it.
Large texts are therefore counted first, beside the event loop, and refused when they hold too much.
"""

from __future__ import annotations

from functools import partial

from tetrad.core.errors import CapacityError, RequestError
from tetrad.server.wire.pace import beside

LIGHT_BYTES = 1 << 15
"""So short a text cannot hold too much."""
LARGE_BYTES = 1 << 17
"""A longer body is read by a process of its own (`http/handover.py`), where there is one."""
MAX_NESTS = 1 << 13
"""Objects and lists of one body: 0.03 s."""
MAX_VALUES = 1 << 19
"""Members and items of one body: 0.04 s."""
MAX_ESCAPES = 1 << 21
"""Backslashes in the strings of one body: 0.05 s."""
MAX_HELD_BYTES = 1 << 28
"""Of all large texts that one process reads at a time."""
PIECE_BYTES = 1 << 16


class Held:
    """The texts that are being read: so many at a time that memory is bounded, whoever sends."""

    def __init__(self) -> None:
        self.total_bytes = 0

    def grow(self, before: int, after: int) -> None:
        """One has grown. Small ones are always let in. Raises CapacityError."""
        if after <= LIGHT_BYTES:
            return
        grown = after - (before if before > LIGHT_BYTES else 0)
        if self.total_bytes + grown > MAX_HELD_BYTES:
            raise CapacityError(
                f"The server is reading {self.total_bytes >> 20} MiB of other large bodies, and "
                f"{MAX_HELD_BYTES >> 20} MiB is the most; try again later."
            )
        self.total_bytes += grown

    def drop(self, num_bytes: int) -> None:
        """One of that size is not needed any more."""
        if num_bytes > LIGHT_BYTES:
            self.total_bytes -= num_bytes


HELD = Held()
"""Of this process."""


async def check_weight(raw: bytearray) -> None:
    """Raise RequestError (413) when reading `raw` would take too long."""
    if len(raw) <= LIGHT_BYTES:
        return
    num_nests, num_commas, num_escapes = await beside(partial(count, raw))
    if num_nests > MAX_NESTS or num_commas >= MAX_VALUES:
        raise RequestError(
            f"The body has {num_nests} objects and lists and {num_commas + 1} values; one request "
            f"may have {MAX_NESTS} and {MAX_VALUES}. Several requests, or text instead of token "
            "ids, would work.",
            http_status=413,
        )
    if num_escapes > MAX_ESCAPES:
        raise RequestError(
            f"The body has {num_escapes} backslashes; one request may have {MAX_ESCAPES}. Several "
            "requests, or text in UTF-8 instead of escapes, would work.",
            http_status=413,
        )


def count(raw: bytes | bytearray) -> tuple[int, int, int]:
    """Objects and lists, and commas, outside of strings; backslashes."""
    num_nests = num_commas = num_escapes = start = 0
    is_in_string = False
    while start < len(raw):
        piece = raw[start : start + PIECE_BYTES]
        num_slashes = len(piece) - len(piece.rstrip(b"\\"))
        if num_slashes % 2:
            # An escape is not torn apart.
            piece = raw[start : start + PIECE_BYTES + 1]
        start += len(piece)
        num_escapes += piece.count(b"\\")
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[is_in_string::2])
        is_in_string ^= len(parts) % 2 == 0
        num_nests += outside.count(b"{") + outside.count(b"[")
        num_commas += outside.count(b",")
    return num_nests, num_commas, num_escapes
