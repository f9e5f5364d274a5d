"""The engine's sockets to the API processes."""

from __future__ import annotations

from collections.abc import Set

import zmq

from tetrad.core.messages import Message
from tetrad.engine.wire import OUTBOX, address, encode


class Outboxes:
    """One socket for each worker. Sockets belong to the thread that made them."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: str) -> None:
        self._context = context
        self._folder = folder
        self._sockets: dict[int, zmq.Socket[bytes]] = {}

    def follow(self, workers: Set[int]) -> None:
        """Speak to these from now on; what is under way to others is dropped."""
        for worker in self._sockets.keys() - workers:
            self._sockets.pop(worker).close(linger=0)
        for worker in workers - self._sockets.keys():
            socket = self._sockets[worker] = self._context.socket(zmq.PUSH)
            socket.set_hwm(0)
            socket.connect(address(self._folder, OUTBOX, worker))

    def send(self, worker: int, message: Message) -> None:
        """Say something to one of them; nobody hears what is said to others."""
        if socket := self._sockets.get(worker):
            socket.send(encode(message))

    def send_all(self, message: Message) -> None:
        """Say something to all."""
        encoded = encode(message)
        for socket in self._sockets.values():
            socket.send(encoded)
