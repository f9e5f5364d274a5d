"""Messages between the engine and the grammar processes: msgpack over sockets that keep messages
apart. What is large travels as a file in memory, by its descriptor."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

import msgspec

from tetrad.core.request import MAX_GRAMMAR_BYTES

MAX_MESSAGE_BYTES = MAX_GRAMMAR_BYTES + 64 * 1024
"""The system's default buffers hold one of these."""
MAX_DESCRIPTORS = 2


def channel() -> tuple[socket.socket, socket.socket]:
    """Two ends."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, message: Sequence[Any], descriptors: Sequence[int] = ()) -> None:
    """Raises OSError when the other end is gone, BlockingIOError when its buffer is full."""
    socket.send_fds(end, [msgspec.msgpack.encode(message)], descriptors)


def receive(end: socket.socket) -> tuple[list[Any], list[int]]:
    """A message and its descriptors. Raises EOFError when the other end is gone."""
    try:
        data, descriptors, _flags, _address = socket.recv_fds(
            end, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS
        )
    except ConnectionResetError:
        raise EOFError from None
    if not data:
        raise EOFError
    return msgspec.msgpack.decode(data), descriptors


def memory_file(name: str, num_bytes: int = 0) -> int:
    """Descriptor of a file in memory that only those who are handed it can reach."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(descriptor, num_bytes)
    return descriptor
