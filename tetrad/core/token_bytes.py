"""What a token of a byte-level vocabulary stands for."""

from __future__ import annotations


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet of GPT-2: printable Latin-1 stands for itself, every other byte for
    the next character from U+0100 on, so that no token contains a space or a control character."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


_BYTES = _byte_of_character()


def bytes_of(token: str) -> bytes:
    """The bytes of a token by its name. One with a character outside the alphabet was added by
    hand: it stands for itself."""
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token.encode()
