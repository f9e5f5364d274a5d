"""How connections and requests come in, and go: a few in each turn of the event loop.

Thousands may come at once. To make a connection, to read a request and to begin it takes the loop
up to a millisecond, and who asks for /health meanwhile waits for the turn to end. So connections
are only accepted at once, which takes some microseconds; they are made and their requests read a
few at a time, in order. Those that ask how the server is need not stand in line.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

P = TypeVar("P", bound=asyncio.Protocol)
_log = logging.getLogger(__name__)

ACCEPTS_A_TURN = 128
CONNECTIONS_A_TURN = 16
REQUESTS_A_TURN = 6
"""Some 4 ms of work: a request is read in one turn and begins in the next."""
EXITS_A_TURN = 16
"""Requests that end as their client has left. It takes each four turns."""
PAUSE_S = 0.1
"""For so long nothing is accepted when the system refuses to."""
LOOK_BYTES = 256
"""In which a probe says what it asks for, whatever --root-path is."""
_PROBE = re.compile(rb"(?:GET|HEAD|POST) [^ ?]*/(?:health|ready|ping|metrics)[ ?]")

TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
TELL_EVERY_S = 60.0


def is_probe(data: bytes) -> bool:
    """Whether a request that begins so asks how the server is."""
    return _PROBE.match(data, 0, LOOK_BYTES) is not None


class Turnstile:
    """Lets so many pass in each turn of the event loop, in order."""

    def __init__(self, num_a_turn: int) -> None:
        self._num_a_turn = num_a_turn
        self._num_now = 0
        """Who has passed in this turn."""
        self._line: deque[Callable[[], None]] = deque()
        self._is_turning = False

    def let_in(self, begin: Callable[[], None]) -> bool:
        """Call `begin`: now, or False if others are before it."""
        is_free = self._num_now < self._num_a_turn and not self._line
        if is_free:
            self._num_now += 1
        else:
            self._line.append(begin)
        if not self._is_turning:
            self._is_turning = True
            asyncio.get_running_loop().call_soon(self._turn)
        if is_free:
            begin()
        return is_free

    def _turn(self) -> None:
        self._num_now = 0
        try:
            while self._line and self._num_now < self._num_a_turn:
                self._num_now += 1
                self._line.popleft()()
        finally:  # one who fails does not hold up the others
            self._is_turning = bool(self._num_now)
            if self._is_turning:
                asyncio.get_running_loop().call_soon(self._turn)


class Entrance(Generic[P]):
    """Takes connections from a listening socket, in place of `loop.create_server`'s server."""

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[], P],
        shut_down: Callable[[P], None],
        tls: ssl.SSLContext | None,
        backlog: int,
    ) -> None:
        """`protocol` makes that of a connection. `shut_down`: for who is made too late to be told
        of the end with the others."""
        self._listener = listener
        self._protocol = protocol
        self._shut_down = shut_down
        self._tls = tls
        self._turnstile = Turnstile(CONNECTIONS_A_TURN)
        self._making: set[asyncio.Task[None]] = set()
        self._spare: int | None = None
        """A descriptor to give up, so that who is one too many can be told by closing."""
        self._is_closed = False
        self._num_turned_away = 0
        self._tell_at = 0.0
        self._keep_spare()
        listener.setblocking(False)
        listener.listen(backlog)
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept)

    def close(self) -> None:
        """Take no more. Who has not ended the handshake of TLS by now has asked for nothing."""
        if not self._is_closed:
            self._is_closed = True
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._give_up_spare()
            for task in self._making if self._tls else ():
                task.cancel()

    async def wait_closed(self) -> None:
        """Those that are being made are made, or have failed."""
        await asyncio.gather(*self._making, return_exceptions=True)

    def _accept(self) -> None:
        try:
            for _ in range(ACCEPTS_A_TURN):
                connection, _ = self._listener.accept()
                self._take(connection)
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            pass
        except OSError as error:
            if error.errno in TOO_MANY_FILES:
                self._turn_away()
            else:
                self._pause()

    def _take(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        make = partial(self._make, connection)
        try:
            begins = connection.recv(LOOK_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            make()  # whether it may pass is seen when it says something
        except OSError:
            connection.close()
        else:
            if is_probe(begins):
                make()
            else:
                self._turnstile.let_in(make)

    def _make(self, connection: socket.socket) -> None:
        if self._is_closed:
            connection.close()
            return
        task = asyncio.get_running_loop().create_task(self._connect(connection))
        self._making.add(task)
        task.add_done_callback(self._making.discard)

    async def _connect(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            loop = asyncio.get_running_loop()
            _, made = await loop.connect_accepted_socket(self._protocol, connection, ssl=self._tls)
        except BaseException as error:
            connection.close()
            if not isinstance(error, OSError):  # those have left, or do not speak TLS
                raise
        else:
            if self._is_closed:
                self._shut_down(made)

    def _turn_away(self) -> None:
        """There is no descriptor for who comes next."""
        self._give_up_spare()
        with contextlib.suppress(OSError):
            self._listener.accept()[0].close()
            self._num_turned_away += 1
        if time.monotonic() >= self._tell_at:
            self._tell_at = time.monotonic() + TELL_EVERY_S
            _log.warning(
                "Clients are turned away, %d so far: the system lets this process open no more "
                "files. Raise the hard limit (LimitNOFILE, --ulimit nofile).",
                self._num_turned_away,
            )
        if not self._keep_spare():
            self._pause()

    def _keep_spare(self) -> bool:
        """Somebody may have taken the last one."""
        if self._spare is None:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY)
        return self._spare is not None

    def _give_up_spare(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            os.close(spare)

    def _pause(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener.fileno())
        loop.call_later(PAUSE_S, self._resume)

    def _resume(self) -> None:
        if not self._is_closed:
            self._keep_spare()
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)
