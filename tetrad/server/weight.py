"""What a JSON text would cost to read, told before it is read.

Reading keeps the interpreter, and with it every stream of the process, until it is done: about
3 to 7 µs for an object, 0.1 to 0.2 µs for another value, next to nothing for a byte of a string.
Large texts are therefore counted first, beside the event loop, and refused when they hold too much.
"""

from __future__ import annotations

import asyncio

from tetrad.core.errors import CapacityError, RequestError

LIGHT_BYTES = 1 << 17
"""So short a text cannot hold too much."""
MAX_NESTS = 1 << 14
"""Objects and lists of one body: 0.1 s."""
MAX_VALUES = 1 << 19
"""Members and items of one body: 0.1 s."""
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
    num_nests, num_commas = await asyncio.to_thread(count, raw)
    if num_nests > MAX_NESTS or num_commas >= MAX_VALUES:
        raise RequestError(
            f"The body has {num_nests} objects and lists and {num_commas + 1} values; one request "
            f"may have {MAX_NESTS} and {MAX_VALUES}. Several requests, or text instead of token "
            "ids, would work.",
            http_status=413,
        )


def count(raw: bytes | bytearray) -> tuple[int, int]:
    """Objects and lists, and commas, outside of strings."""
    num_nests = num_commas = start = 0
    is_in_string = False
    while start < len(raw):
        piece = raw[start : start + PIECE_BYTES]
        num_slashes = len(piece) - len(piece.rstrip(b"\\"))
        if num_slashes % 2:
            # An escape is not torn apart.
            piece = raw[start : start + PIECE_BYTES + 1]
        start += len(piece)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[is_in_string::2])
        is_in_string ^= len(parts) % 2 == 0
        num_nests += outside.count(b"{") + outside.count(b"[")
        num_commas += outside.count(b",")
    return num_nests, num_commas
