"""Bytes on a socket, as the worst of networks and servers send them."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.bench.test_failures import config, prompts, run
from tetrad.bench.load.client import Client, Load, run_load
from tetrad.bench.load.wire import Connection, Pool
from tetrad.core.records import BenchRun

__all__ = ["prompts"]

Play = Callable[[asyncio.StreamWriter], Awaitable[None]]


def events(tokens: int = 8, end: bytes = b"\n") -> bytes:
    said: list[Any] = [{"delta": {"content": "é🧮"}, "finish_reason": None}] * (tokens - 1)
    said.append({"delta": {"content": "."}, "finish_reason": "length"})
    bodies: list[Any] = [{"choices": [choice]} for choice in said]
    bodies.append({"choices": [], "usage": {"completion_tokens": tokens, "prompt_tokens": 5}})
    lines = [json.dumps(body, ensure_ascii=False).encode() for body in bodies]
    return b"".join(
        b": ping" + end * 2 + b"data: " + line + end * 2 for line in [*lines, b"[DONE]"]
    )


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def chunked(body: bytes, size: int = 50) -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%X\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@asynccontextmanager
async def playing(play: Play, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """A server that reads a request and lets `play` answer; everything else is 404."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                said = re.search(rb"(?i)content-length: (\d+)", head)
                await reader.readexactly(int(said[1]) if said else 0)
                if head.startswith(b"POST"):
                    await play(writer)
                else:
                    writer.write(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield f"{'https' if tls else 'http'}://127.0.0.1:{port}"


async def bench(play: Play, prompts) -> BenchRun:
    async with playing(play) as url:
        return await run(config(url, prompts, backend="vllm-chat", model="m", max_concurrency=1))


async def in_pieces(writer: asyncio.StreamWriter, answer: bytes, size: int) -> None:
    for at in range(0, len(answer), size):
        writer.write(answer[at : at + size])
        await writer.drain()
        await asyncio.sleep(0)


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("size", [1, 7, 64, 100_000])
async def test_any_cut_of_the_stream_is_one_answer(size: int, end: bytes, prompts):
    """Heads, chunk sizes, events and characters are cut in two wherever it hurts."""
    answer = CHUNKED + chunked(events(end=end))
    result = await bench(lambda writer: in_pieces(writer, answer, size), prompts)
    assert (result.completed, result.failed) == (4, 0), result.failures
    assert (result.output_tokens, result.input_tokens) == (32, 20)


async def closing(writer: asyncio.StreamWriter, answer: bytes) -> None:
    writer.write(answer)
    await writer.drain()
    writer.close()


@pytest.mark.parametrize(
    "head", [HEAD + b"Connection: close\r\n\r\n", HEAD.replace(b"1.1", b"1.0") + b"\r\n"]
)
async def test_the_end_of_the_connection_may_end_the_answer(head: bytes, prompts):
    result = await bench(lambda writer: closing(writer, head + events()), prompts)
    assert (result.completed, result.output_tokens) == (4, 32)


async def test_an_answer_may_have_a_length(prompts):
    body = events()
    answer = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    result = await bench(lambda writer: in_pieces(writer, answer, 40), prompts)
    assert (result.completed, result.output_tokens) == (4, 32)


async def reset(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (b"", "disconnected", "the server closed it"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "malformed", "not HTTP: an answer that begins with"),
        (HEAD[:40], "truncated", "the connection broke: the server closed it"),
        (CHUNKED + chunked(events())[:200], "truncated", "the connection broke"),
        (CHUNKED + b"zz\r\n\r\n", "malformed", "not HTTP: a chunk of size b'zz'"),
        (HEAD + b"Content-Length: 9999\r\n\r\n" + events(), "truncated", "the connection broke"),
    ],
)
async def test_broken_answers_are_named(answer: bytes, kind: str, message: str, prompts):
    result = await bench(lambda writer: closing(writer, answer), prompts)
    assert [(f.kind, f.count) for f in result.failures] == [(kind, 4)]
    assert message in result.failures[0].example


async def test_a_reset_before_any_answer_is_a_failure(prompts):
    result = await bench(reset, prompts)
    assert [(f.kind, f.count) for f in result.failures] == [("disconnected", 4)]


async def test_an_event_of_a_long_context_comes_whole(prompts):
    """Fifty thousand tokens in one event, a few hundred kilobytes."""
    text = "token " * 50_000
    body = {"choices": [{"delta": {"content": text}, "finish_reason": "length"}]}
    usage = {"choices": [], "usage": {"completion_tokens": 8}}
    lines = b"".join(b"data: %b\n\n" % json.dumps(part).encode() for part in (body, usage))
    answer = CHUNKED + chunked(lines, size=2**20)
    result = await bench(lambda writer: in_pieces(writer, answer, 2**16), prompts)
    assert (result.completed, result.output_tokens) == (4, 32)


async def test_the_load_goes_over_tls(tmp_path, monkeypatch):
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", key, "-out", cert),
        ],
        check=True,
        capture_output=True,
    )
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)
    answer = CHUNKED + chunked(events())
    async with playing(lambda writer: in_pieces(writer, answer, 64), tls) as url:
        load = Load("/v1/chat/completions", [b"{}"] * 4, [0.0] * 4, max_concurrency=2)
        result = await run_load(Client(url, {}, 10.0), load, lambda _: None)
    assert [trace.failure for trace in result.traces] == [None] * 4
    assert [trace.body() for trace in result.traces] == [events()] * 4


async def test_a_connection_of_its_own_is_part_of_a_request_s_latencies(prompts, monkeypatch):
    """Open loops connect within the measured time, and TTFT once began when they had; requests on
    an open connection begin as ever."""
    begun: list[float] = []
    connect = Pool.connect

    async def watched(pool: Pool) -> Connection:
        begun.append(time.perf_counter())
        return await connect(pool)

    monkeypatch.setattr(Pool, "connect", watched)
    monkeypatch.setattr("tetrad.bench.load.client.OPENED_AHEAD_S", -1.0)
    answer = CHUNKED + chunked(events())
    async with playing(lambda writer: in_pieces(writer, answer, 4096)) as url:
        load = Load("/v1/chat/completions", [b"{}"] * 3, [0.0] * 3, max_concurrency=1)
        result = await run_load(Client(url, {}, 5.0), load, lambda trace: None)
    first, second, third = result.traces
    assert len(begun) == 1
    assert first.origin + first.sent_s <= begun[0]
    assert first.ended_s <= second.sent_s < second.ended_s <= third.sent_s
