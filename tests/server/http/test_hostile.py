"""Clients that mean harm, or are broken, on real sockets: each is told or closed within its bound,
nothing of it stays, and the server goes on."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
from collections.abc import AsyncIterator, Callable
from urllib.parse import urlsplit

import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.server import ServerState

from tests.server.conftest import until
from tests.server.fake_engine import FakeEngine, saying
from tetrad.server.app import build_app
from tetrad.server.bodies.weight import HELD
from tetrad.server.http import connections
from tetrad.server.http.connections import MAX_HEAD_BYTES, Connection
from tetrad.server.http.entrance import Turnstile
from tetrad.server.service import Service

GENERATE = b"POST /generate HTTP/1.1\r\nHost: x\r\n"
BODY = json.dumps({"text": "3", "sampling_params": {"max_new_tokens": 2}}).encode()
WHOLE = GENERATE + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


class Client:
    """A socket that sends what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def flood(self, data: bytes) -> int:
        """Send it until the server closes; returns how many bytes that took."""
        sent = 0
        with contextlib.suppress(ConnectionError):
            while not self.writer.is_closing():
                self.send(data)
                sent += len(data)
                await self.writer.drain()
                await asyncio.sleep(0)
        return sent

    async def rest(self) -> bytes:
        """All that comes until the server closes."""
        got = b""
        async with asyncio.timeout(30):
            with contextlib.suppress(ConnectionError):
                while piece := await self.reader.read(65536):
                    got += piece
        return got

    async def status(self) -> int:
        """Of the only answer before the server closes; 0 without one."""
        got = await self.rest()
        return int(got.split(b" ", 2)[1]) if got else 0


Connect = Callable[[], "asyncio.Future[Client]"]


@pytest.fixture
async def connect(address: str, service: Service, engine: FakeEngine) -> AsyncIterator[Connect]:
    """Opens connections. At the end all is as before: no request, connection or task is left, and
    another client is served."""
    parts = urlsplit(address)
    writers: list[asyncio.StreamWriter] = []

    async def opened() -> Client:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writers.append(writer)
        return Client(reader, writer)

    num_tasks = len(asyncio.all_tasks())
    yield lambda: asyncio.ensure_future(opened())
    other = await opened()
    other.send(WHOLE + HEALTH)
    answer = await asyncio.wait_for(other.reader.readuntil(b"HTTP/1.1 200 OK"), 30)
    assert answer.startswith(b"HTTP/1.1 200")
    for writer in writers:
        writer.close()
    async with asyncio.timeout(30):
        await until(lambda: not engine.live and service.open_requests == 0)
        await until(lambda: HELD.total_bytes == 0)
        await until(lambda: len(asyncio.all_tasks()) <= num_tasks)


def living(kind: type) -> int:
    gc.collect()
    return sum(type(each) is kind for each in gc.get_objects())


def shorten(monkeypatch: pytest.MonkeyPatch, **limits: float) -> None:
    for name, value in limits.items():
        monkeypatch.setattr(connections, name, value)


async def test_headers_that_do_not_end_in_time(connect: Connect, monkeypatch):
    shorten(monkeypatch, HEAD_S=0.2)
    client = await connect()
    client.send(b"GET /health HTTP/1.1\r\nHost:")
    assert await client.status() == 408


async def test_headers_that_come_a_byte_at_a_time(connect: Connect, monkeypatch):
    """A byte buys no time."""
    shorten(monkeypatch, HEAD_S=0.5)
    client = await connect()
    client.send(b"GET /health HTTP/1.1\r\nX: ")
    dripping = asyncio.create_task(drip(client))
    assert await client.status() == 408
    dripping.cancel()


async def drip(client: Client) -> None:
    while True:
        client.send(b"1")
        await asyncio.sleep(0.02)


async def test_a_connection_that_says_nothing(connect: Connect, monkeypatch):
    shorten(monkeypatch, FIRST_BYTE_S=0.2)
    assert await (await connect()).rest() == b""


@pytest.mark.parametrize("flood", [b"a" * 1000, b"X-A: b\r\n" * 100], ids=["one", "many"])
async def test_headers_without_end(connect: Connect, flood: bytes):
    client = await connect()
    client.send(b"GET /health HTTP/1.1\r\nX-A: ")
    reading = asyncio.create_task(client.status())
    sent = await client.flood(flood)
    assert await reading in (431, 0)  # what is still sent may cost the client its answer
    assert sent < 100 * MAX_HEAD_BYTES


async def test_headers_that_are_too_large_are_told(connect: Connect):
    client = await connect()
    client.send(b"GET /health HTTP/1.1\r\nX-A: " + b"a" * (MAX_HEAD_BYTES + 1))
    assert await client.status() == 431


async def test_trailers_without_end(connect: Connect):
    client = await connect()
    client.send(GENERATE + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n")
    client.send(b"X-A: b\r\n" * (MAX_HEAD_BYTES // 4))
    assert await client.status() in (400, 431)


@pytest.mark.parametrize("head", [b"Content-Length: 999999", b"Transfer-Encoding: chunked"])
async def test_a_body_that_stops_halfway(connect: Connect, head: bytes, monkeypatch):
    shorten(monkeypatch, BODY_S=0.2)
    client = await connect()
    client.send(GENERATE + head + b"\r\n\r\n" + b"40000\r\n" + b" " * 0x30000)
    assert await client.status() == 408


async def test_a_body_that_comes_a_byte_at_a_time(connect: Connect, monkeypatch):
    shorten(monkeypatch, BODY_S=0.5)
    client = await connect()
    client.send(GENERATE + b"Content-Length: 9999\r\n\r\n")
    dripping = asyncio.create_task(drip(client))
    assert await client.status() == 408
    dripping.cancel()


async def test_a_body_in_chunks_without_end(connect: Connect, service: Service, monkeypatch):
    """It is told that this is too much, and closed when it still goes on."""
    service.config = service.config.model_copy(update={"max_request_body": 0.1})
    shorten(monkeypatch, REST_S=0.2)
    client = await connect()
    client.send(GENERATE + b"Transfer-Encoding: chunked\r\n\r\n")
    reading = asyncio.create_task(client.status())
    await client.flood(b"1000\r\n" + b" " * 0x1000 + b"\r\n")
    assert await reading == 413


async def test_a_client_that_sends_on_after_its_answer(connect: Connect, monkeypatch):
    shorten(monkeypatch, REST_S=0.2)
    client = await connect()
    client.send(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\n")
    assert await client.status() == 404


async def test_a_reader_that_never_reads(connect: Connect, engine: FakeEngine, monkeypatch):
    """Else its request would hold a place in the queue for ever."""
    shorten(monkeypatch, READER_S=0.3)
    engine.script = saying([18] * 300_000, num_per_step=100)
    engine.step_s = 0.001
    engine.info["context_length"] = engine.info["max_total_tokens"] = 10**6
    client = await connect()
    client.reader._transport.pause_reading()  # type: ignore[attr-defined]
    body = b'{"text": "3", "stream": true, "sampling_params": {"max_new_tokens": 300000}}'
    client.send(GENERATE + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    await until(lambda: bool(engine.seen))
    async with asyncio.timeout(60):
        await until(lambda: not engine.live)
    assert engine.aborted


async def test_a_reader_that_is_slow_is_waited_for(monkeypatch):
    """It takes enough three times, and then too little."""
    shorten(monkeypatch, READER_S=0.02)
    waiting = [200_000, 150_000, 150_000, 90_000, 90_000, 80_000, 80_000, 79_000]
    closed = asyncio.Event()

    class Transport(asyncio.Transport):
        def get_write_buffer_size(self) -> int:
            return waiting.pop(0)

        def abort(self) -> None:
            closed.set()

    connection = Connection(
        uvicorn.Config(build_app), ServerState(), {}, turnstile=Turnstile(1), exits=Turnstile(1)
    )
    connection.transport = Transport()
    connection.flow = FlowControl(connection.transport)
    connection.pause_writing()
    async with asyncio.timeout(30):
        await closed.wait()
    assert waiting == []


async def test_a_half_closed_socket_is_a_client_that_left(connect: Connect, engine: FakeEngine):
    engine.gate.clear()
    client = await connect()
    client.send(WHOLE)
    await until(lambda: bool(engine.live))
    client.writer.write_eof()
    async with asyncio.timeout(30):
        await until(lambda: not engine.live)
    engine.gate.set()
    assert len(engine.aborted) == 1


async def test_many_requests_in_one_piece(connect: Connect):
    """Each is answered, in their order."""
    client = await connect()
    client.send((HEALTH + WHOLE) * 200 + HEALTH.replace(b"Host", b"Connection: close\r\nHost"))
    answers = (await client.rest()).split(b"HTTP/1.1 200 OK")[1:]
    assert len(answers) == 401
    assert [b"meta_info" in answer for answer in answers] == [False, True] * 200 + [False]


@pytest.mark.parametrize("kind", [b"websocket", b"h2c", b"TLS/1.0"])
async def test_an_upgrade_that_is_not_there(connect: Connect, kind: bytes):
    """The request is answered as it stands."""
    upgrade = b"Connection: %sUpgrade, HTTP2-Settings\r\nUpgrade: %s\r\nHTTP2-Settings: A\r\nHost"
    client = await connect()
    client.send(HEALTH.replace(b"Host", upgrade % (b"", kind)))
    client.send(WHOLE.replace(b"Host", upgrade % (b"", kind)))
    client.send(WHOLE.replace(b"Host", upgrade % (b"close, ", kind)))
    answers = (await client.rest()).split(b"HTTP/1.1 200 OK")
    assert [b"meta_info" in answer for answer in answers[1:]] == [False, True, True]


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x00" * 1000,
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\n\r\n",
        b"GET /%00%ff%zz?\xff HTTP/1.1\r\nConnection: close\r\n\r\n",
        b"GET /health HTTP/1.1\r\nX-A: \xff\xfe\r\nConnection: close\r\n\r\n",
        b"GET /v1/models/%ff%fe HTTP/1.1\r\nConnection: close\r\n\r\n",
        b"GET http://[::1 HTTP/1.1\r\nConnection: close\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nConnection: close\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nConnection: close\r\n\r\n",
        b"GET " + b"/a" * 20_000 + b" HTTP/1.1\r\nConnection: close\r\n\r\n",
        GENERATE + b"Content-Length: -1\r\n\r\n",
        GENERATE + b"Content-Length: 1e3\r\n\r\n",
        GENERATE + b"Content-Length: 99999999999999999999999\r\n\r\n",
        GENERATE + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}   ",
        GENERATE + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        GENERATE + b"Transfer-Encoding: gzip\r\n\r\n",
        GENERATE + b"Transfer-Encoding: chunked\r\n\r\nZ\r\n",
        GENERATE + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
        GENERATE + b"Content-Encoding: gzip\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}",
        GENERATE + b"X-A : b\r\nX\x00: y\r\n\r\n",
        GENERATE + b" folded\r\n\r\n",
    ],
)
async def test_what_is_no_request(connect: Connect, raw: bytes, monkeypatch):
    shorten(monkeypatch, HEAD_S=0.3, BODY_S=0.3, FIRST_BYTE_S=0.3, REST_S=0.3)
    client = await connect()
    client.send(raw)
    assert 200 <= await client.status() < 500


async def test_requests_with_bytes_changed(connect: Connect, monkeypatch):
    """Whatever becomes of a good request when some of it is lost, doubled or something else."""
    shorten(monkeypatch, HEAD_S=0.1, BODY_S=0.1, FIRST_BYTE_S=0.1, REST_S=0.1)
    monkeypatch.setattr("tetrad.server.http.server.KEEP_ALIVE_S", 0.1)
    rng = random.Random(0)
    for _ in range(8):
        clients = [await connect() for _ in range(40)]
        for client in clients:
            client.send(changed(WHOLE, rng))
            with contextlib.suppress(OSError):  # it may be closed already
                client.writer.write_eof()
        for status in await asyncio.gather(*(client.status() for client in clients)):
            assert status < 500
    async with asyncio.timeout(30):
        await until(lambda: living(Connection) <= 40)


def changed(raw: bytes, rng: random.Random) -> bytes:
    data = bytearray(raw)
    for _ in range(rng.randrange(1, 5)):
        place, length = rng.randrange(len(data)), rng.randrange(1, 9)
        match rng.randrange(4):
            case 0:
                data[place] = rng.randrange(256)
            case 1:
                del data[place : place + length]
            case 2:
                data[place:place] = data[place : place + length] * rng.randrange(1, 99)
            case 3:
                data[place:place] = rng.randbytes(length)
        data = data or bytearray(b"x")
    return bytes(data)
