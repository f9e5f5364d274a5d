"""However many begin at once: each is served, a few in a turn of the event loop, and who asks for
health need not wait for them."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from functools import partial
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.server.conftest import until
from tests.server.fake_engine import FakeEngine, saying
from tetrad.server.http import entrance
from tetrad.server.http import server as server_http
from tetrad.server.http.entrance import Entrance, Turnstile, is_probe
from tetrad.server.http.server import HttpServer
from tetrad.server.service import Service
from tetrad.server.wire import pace

MANY = 150
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def request(number: int) -> tuple[bytes, bytes]:
    """Head and body."""
    body = json.dumps({"text": f"{number} ", "sampling_params": {"max_new_tokens": 1}}).encode()
    return b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body), body


@pytest.fixture
async def narrow(service: Service, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """The port of a server into which one connection and one request come in each turn, and from
    which one goes."""
    monkeypatch.setattr(entrance, "CONNECTIONS_A_TURN", 1)
    monkeypatch.setattr(server_http, "REQUESTS_A_TURN", 1)
    monkeypatch.setattr(server_http, "EXITS_A_TURN", 1)
    # However slow the machine is, no request is long work that others pass.
    monkeypatch.setattr(pace, "SHARE_S", 3600.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        http = HttpServer(service, listener)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            await http.end()


@pytest.mark.parametrize(
    ("begins", "is_one"),
    [
        (HEALTH, True),
        (b"GET /root/ready?x HTTP/1.1\r\n", True),
        (b"POST /ping HTTP/1.1\r\n", True),
        (b"GET /metrics HTTP/1.1\r\n", True),
        (b"GET /health_generate HTTP/1.1\r\n", False),
        (b"POST /generate?a=/health HTTP/1.1\r\n", False),
        (b"POST /generate HTTP/1.1\r\nReferer: /health \r\n", False),
        (b"GET /" + b"x" * 300 + b"/health HTTP/1.1\r\n", False),
        (b"\x16\x03\x01", False),
        (b"", False),
    ],
)
def test_who_asks_how_the_server_is_is_known_by_the_first_line(begins: bytes, is_one: bool):
    assert is_probe(begins) == is_one


async def test_a_turnstile_lets_so_many_pass_in_a_turn_and_in_order():
    turnstile = Turnstile(3)
    passed: list[int] = []
    assert [turnstile.let_in(partial(passed.append, n)) for n in range(8)] == [
        *[True] * 3,
        *[False] * 5,
    ]
    counts = []
    while len(passed) < 8:
        counts.append(len(passed))
        await asyncio.sleep(0)
    assert counts == [3, 6]
    assert passed == list(range(8))
    await asyncio.sleep(0)
    assert turnstile.let_in(partial(passed.append, 8))


async def test_all_are_served_and_a_probe_passes_them(narrow: str, engine: FakeEngine):
    engine.script = saying([18])
    parts = urlsplit(narrow)
    streams = []
    for number in range(MANY):
        # Before the event loop has had a turn: all wait to be accepted.
        client = socket.create_connection((parts.hostname, parts.port))
        client.sendall(b"".join(request(number)))
        streams.append(client)
    with socket.create_connection((parts.hostname, parts.port)) as probe:
        probe.sendall(HEALTH)
        probe.setblocking(False)
        answer = await asyncio.get_running_loop().sock_recv(probe, 1024)
    assert answer.startswith(b"HTTP/1.1 200")
    assert len(engine.seen) < MANY // 2
    for client in streams:
        client.setblocking(False)
        answer = await asyncio.get_running_loop().sock_recv(client, 4096)
        assert answer.startswith(b"HTTP/1.1 200")
        client.close()
    assert len(engine.seen) == MANY
    assert [request.prompt_ids for request in engine.seen] == sorted(
        (request.prompt_ids for request in engine.seen), key=lambda ids: (len(ids), ids)
    )


async def test_a_request_in_pieces_comes_in_whole(narrow: str, engine: FakeEngine):
    """Its rest comes while it stands in line."""
    engine.script = saying([18])
    parts = urlsplit(narrow)
    opened = [await asyncio.open_connection(parts.hostname, parts.port) for _ in range(40)]
    for number, (_, writer) in enumerate(opened):
        head, body = request(number)
        writer.write(head + body[:5])
    await asyncio.sleep(0)
    for number, (_, writer) in enumerate(opened):
        writer.write(request(number)[1][5:])
    for reader, writer in opened:
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()
    assert len(engine.seen) == 40


async def test_who_leaves_while_it_stands_in_line_leaves_nothing(
    narrow: str, engine: FakeEngine, service: Service
):
    parts = urlsplit(narrow)
    for number in range(MANY):
        with socket.create_connection((parts.hostname, parts.port)) as client:
            client.sendall(b"".join(request(number)))
    await until(lambda: len(engine.seen) > 0 and not engine.live)
    with socket.create_connection((parts.hostname, parts.port)) as probe:
        probe.setblocking(False)
        await asyncio.get_running_loop().sock_sendall(probe, HEALTH)
        answer = await asyncio.get_running_loop().sock_recv(probe, 1024)
    assert answer.startswith(b"HTTP/1.1 200")
    await until(lambda: service.open_requests == 0)


async def test_those_who_leave_at_once_are_let_go_one_after_another(
    narrow: str, engine: FakeEngine, service: Service
):
    engine.gate.clear()
    parts = urlsplit(narrow)
    clients = [socket.create_connection((parts.hostname, parts.port)) for _ in range(12)]
    for number, client in enumerate(clients):
        client.sendall(b"".join(request(number)))
    await until(lambda: len(engine.live) == len(clients))
    for client in clients:
        client.close()
    counts = [0]
    async with asyncio.timeout(30):
        while counts[-1] < len(clients):
            await asyncio.sleep(0)
            counts.append(len(engine.aborted))
    engine.gate.set()
    assert max(now - before for before, now in pairwise(counts)) == 1
    await until(lambda: service.open_requests == 0)


@pytest.fixture
async def slow_exit(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[int, set[Any]]]:
    """The port of a server from which one request goes in each turn, and its connections."""
    monkeypatch.setattr(server_http, "EXITS_A_TURN", 1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        http = HttpServer(service, listener)
        try:
            yield listener.getsockname()[1], http._server.server_state.connections
        finally:
            await http.end()


async def test_who_has_left_is_not_told_of_the_end(
    slow_exit: tuple[int, set[Any]], engine: FakeEngine
):
    """Though its request still waits to be let go. Each has sent a part of its body."""
    port, connections = slow_exit
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(30)]
    for number, client in enumerate(clients):
        head, body = request(number)
        client.sendall(head + body[:5])
    await until(lambda: sum(not c._is_in_head for c in connections) == len(clients))
    for client in clients:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
    for _ in range(8):  # turns
        await asyncio.sleep(0)
    assert not connections
    assert not engine.seen


async def test_who_leaves_has_none_of_its_requests_answered(
    slow_exit: tuple[int, set[Any]], engine: FakeEngine, service: Service
):
    """The first runs, the second stands behind it."""
    engine.gate.clear()
    port, connections = slow_exit
    client = socket.create_connection(("127.0.0.1", port))
    client.sendall(b"".join(request(1)) * 2)
    await until(lambda: bool(engine.live))
    (connection,) = connections
    await until(lambda: bool(connection.pipeline))
    connection.transport.abort()
    client.close()
    async with asyncio.timeout(30):
        await until(lambda: not engine.live and service.open_requests == 0)
    engine.gate.set()
    assert len(engine.aborted) == len(engine.seen) == 1


async def test_who_fails_in_the_turnstile_does_not_hold_up_others():
    turnstile = Turnstile(1)
    passed: list[int] = []

    def fail() -> None:
        raise ValueError

    asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
    turnstile.let_in(partial(passed.append, 0))
    turnstile.let_in(fail)
    turnstile.let_in(partial(passed.append, 1))
    async with asyncio.timeout(30):
        await until(lambda: passed == [0, 1])


async def test_who_stands_in_line_when_it_closes_is_closed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(entrance, "CONNECTIONS_A_TURN", 1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        door = Entrance(listener, asyncio.Protocol, lambda _: None, None, 30)
        clients = [socket.create_connection(listener.getsockname()) for _ in range(20)]
        for client in clients:
            client.sendall(b"POST")
        while not door._turnstile._line:
            await asyncio.sleep(0)
        door.close()
        await door.wait_closed()
        clients[-1].setblocking(False)
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(asyncio.get_running_loop().sock_recv(clients[-1], 1), 5)
        for client in clients:
            client.close()
        await asyncio.sleep(0.05)


class Late(asyncio.Protocol):
    """A connection of a server."""

    transport: asyncio.BaseTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport


async def reads_the_end(client: socket.socket) -> bool:
    client.setblocking(False)
    received = asyncio.get_running_loop().sock_recv(client, 1)
    return await asyncio.wait_for(received, 5) == b""


async def test_who_is_made_while_it_closes_is_told_of_the_end():
    """The server has told those it knew of by then."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        door = Entrance(listener, Late, lambda late: late.transport.close(), None, 30)
        with socket.create_connection(listener.getsockname()) as client:
            while not door._making:
                await asyncio.sleep(0)
            door.close()
            await asyncio.wait_for(door.wait_closed(), 5)
            assert await reads_the_end(client)


async def test_a_handshake_is_not_waited_for_at_the_end():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        door = Entrance(listener, Late, lambda _: None, context, 30)
        with socket.create_connection(listener.getsockname()) as client:
            while not door._making:
                await asyncio.sleep(0)
            await asyncio.sleep(0.05)  # it is under way
            door.close()
            await asyncio.wait_for(door.wait_closed(), 5)
            assert await reads_the_end(client)


async def test_a_spare_descriptor_that_somebody_took_is_not_closed(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        door = Entrance(listener, Late, lambda _: None, None, 30)
        spare = door._spare
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", no_descriptor)
            door._turn_away()
        taken = os.open(os.devnull, os.O_RDONLY)
        assert taken == spare
        door._turn_away()
        door.close()
        os.fstat(taken)
        os.close(taken)


def no_descriptor(*_: Any) -> int:
    raise OSError(errno.EMFILE, "Too many open files")
