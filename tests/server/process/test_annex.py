"""Requests with large bodies are answered by another process as if they were answered here."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.server.conftest import MakeService, until
from tests.server.fake_engine import FakeEngine, saying
from tetrad.core.config import ServeConfig
from tetrad.server.app import build_app
from tetrad.server.bodies.weight import HELD, LARGE_BYTES
from tetrad.server.http import handover
from tetrad.server.http.frames import Ask, Frame, Gone, Line, Piece, Ready, Start
from tetrad.server.http.handover import HandOver
from tetrad.server.model import ServedModel
from tetrad.server.process import annex
from tetrad.server.process.annex import PIECE_BYTES, AnnexServer, listening
from tetrad.server.process.worker import Worker
from tetrad.server.requests import BEGAN_AT
from tetrad.server.service import Service
from tetrad.server.shared.tally import IS_SERVING

FILL = b" " * LARGE_BYTES
GENERATE = {"text": "3", "sampling_params": {"max_new_tokens": 6}, "rid": "r"}
CHAT = {"messages": [{"role": "user", "content": "3"}], "max_tokens": 6}


async def nobody(scope: Scope, receive: Receive, send: Send) -> None:
    """An application to which nothing may come."""
    raise AssertionError(scope["path"])


@asynccontextmanager
async def serving(service: Service, app: ASGIApp | None = None) -> AsyncIterator[str]:
    """An annex in this process; yields where it listens. `app` stands in for its application."""
    with listening(has_annex=True) as listener, pytest.MonkeyPatch.context() as patch:
        assert listener is not None
        if app is not None:
            patch.setattr(annex, "build_app", lambda _: app)
        server = AnnexServer(service, listener)
        await server.listens()
        try:
            yield listener.getsockname()
        finally:
            await server.end()


@asynccontextmanager
async def falling(service: Service, *said: Frame, num_heard: int = 1) -> AsyncIterator[HandOver]:
    """Before an annex that hears so many frames, says these, and dies."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = Line(reader, writer)
        await line.say(Ready())
        for _ in range(num_heard):
            await line.hear()
        for frame in said:
            await line.say(frame)
        writer.close()

    with listening(has_annex=True) as listener:
        assert listener is not None
        listener.setblocking(False)
        server = await asyncio.start_unix_server(serve, sock=listener)
        try:
            yield HandOver(nobody, service, listener.getsockname())
        finally:
            server.close()


class Call:
    """One request to an application; `messages` is what its server gives, piece by piece."""

    def __init__(self, *bodies: bytes, method: str = "POST", path: str = "/generate") -> None:
        self.scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "https",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"a=1",
            "root_path": "",
            "headers": [(b"content-length", b"%d" % sum(map(len, bodies)))],
            "client": ("192.0.2.7", 1234),
            "server": ("127.0.0.1", 80),
            "state": {},
        }
        self._bodies = list(bodies)
        self.lacks_bytes = False
        """Whether the last piece says that there are more."""
        self.num_received = 0
        self.left = asyncio.Event()
        self.reads = asyncio.Event()
        """Whether the client takes what is sent."""
        self.reads.set()
        self.sent: list[Message] = []

    def add_header(self, name: bytes, value: bytes) -> None:
        self.scope["headers"].append((name, value))

    def in_chunks(self) -> Call:
        self.scope["headers"] = [(b"transfer-encoding", b"chunked")]
        return self

    async def receive(self) -> Message:
        if not self._bodies:
            await self.left.wait()
            return {"type": "http.disconnect"}
        self.num_received += 1
        body = self._bodies.pop(0)
        has_more = bool(self._bodies) or self.lacks_bytes
        return {"type": "http.request", "body": body, "more_body": has_more}

    async def send(self, message: Message) -> None:
        await self.reads.wait()
        self.sent.append(message)

    async def to(self, app: ASGIApp) -> Call:
        async with asyncio.timeout(20):
            await app(self.scope, self.receive, self.send)
        return self

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])

    @property
    def is_whole(self) -> bool:
        return not self.sent[-1].get("more_body", False)


def raw(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode() + FILL


def pieces(content: bytes, size: int) -> list[bytes]:
    return [content[begin : begin + size] for begin in range(0, len(content), size)]


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "stream": ("/generate", GENERATE | {"stream": True}),
    "whole": ("/generate", GENERATE),
    "chat": ("/v1/chat/completions", CHAT),
    "chat stream": ("/v1/chat/completions", CHAT | {"stream": True}),
    "tokenize": ("/tokenize", {"prompt": "3+5"}),
    "refused": ("/v1/chat/completions", {"messages": 3}),
    "unknown path": ("/v1/nothing", {}),
    "no json": ("/v1/messages", {}),
}


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("size", [1000, 1 << 16, 1 << 20])
async def test_the_answer_is_the_same(
    name: str, size: int, make_service: MakeService, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tetrad.server.stream.choices.uuid.uuid4", lambda: Same())
    monkeypatch.setattr(time, "time", lambda: 1.5)
    path, value = REQUESTS[name]
    here = await Call(raw(value), path=path).to(build_app(make_service()))
    async with serving(make_service()) as place:
        app = HandOver(nobody, make_service(), place)
        there = await Call(*pieces(raw(value), size), path=path).to(app)
        chunked = await Call(*pieces(raw(value), size), path=path).in_chunks().to(app)
    for other in (there, chunked):
        assert other.status == here.status
        assert timeless(other) == timeless(here)
        assert without_own(other) == without_own(here)
    assert HELD.total_bytes == 0


def timeless(call: Call) -> bytes:
    return re.sub(rb'_latency":[^,}]+', b"", call.body)


class Same:
    hex = "0" * 32


def without_own(call: Call) -> list[tuple[bytes, bytes]]:
    own = (b"x-request-id", b"content-length")  # that counts the digits of times, too
    return [pair for pair in call.sent[0]["headers"] if pair[0].lower() not in own]


async def test_everything_else_is_served_here(make_service: MakeService):
    """What is small, has no body that is read, or one that is larger than any that is read."""
    service = make_service(max_request_body=1)
    seen: list[int] = []

    async def here(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((await receive())["body"].count(b"x"))

    app = HandOver(here, service, "/nowhere")
    small = b"x" * LARGE_BYTES
    await Call(small).to(app)
    await Call(*pieces(small, 1000)).in_chunks().to(app)
    await Call(small + b"x", method="GET").to(app)
    await Call(b"x" * 2**20 + b"x").to(app)
    assert seen == [LARGE_BYTES, LARGE_BYTES, LARGE_BYTES + 1, 2**20 + 1]


async def test_a_body_that_is_too_large_is_not_asked_for(make_service: MakeService):
    service = make_service(max_request_body=1)
    call = await Call(b"x" * 2**20, b"x").to(HandOver(build_app(service), service, "/nowhere"))
    assert (call.status, call.num_received) == (413, 0)
    async with serving(make_service(max_request_body=1)) as place:
        grown = Call(*[b"x" * LARGE_BYTES] * 32).in_chunks()
        await grown.to(HandOver(nobody, service, place))
    assert grown.status == 413
    assert grown.num_received < 11
    assert HELD.total_bytes == 0


async def test_a_request_that_its_head_forbids_is_not_read(make_service: MakeService):
    """So that who waits for 100 Continue is told without sending it."""
    async with serving(make_service(api_key="sesame")) as place:
        call = await Call(FILL, b"x").to(HandOver(nobody, make_service(), place))
    assert (call.status, call.num_received) == (401, 0)


async def test_its_application_sees_the_same_request(make_service: MakeService):
    seen: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)
        await send({"type": "http.response.start", "status": 204, "headers": [(b"a", b"\xff")]})
        await send({"type": "http.response.body", "body": b""})

    before = time.monotonic()
    async with serving(make_service(), app) as place:
        call = Call(FILL, b"x")
        call.add_header(b"x-request-id", b"\xe9")
        await call.to(HandOver(nobody, make_service(), place))
    (scope,) = seen
    assert before < scope["state"].pop(BEGAN_AT) < time.monotonic()
    assert scope == call.scope
    assert call.sent[0] == {
        "type": "http.response.start",
        "status": 204,
        "headers": [(b"a", b"\xff")],
    }


async def test_time_that_was_waited_counts(make_service: MakeService):
    call = Call(raw(GENERATE))
    call.add_header(b"x-request-timeout", b"50")
    call.scope["state"][BEGAN_AT] = time.monotonic() - 100
    assert (await call.to(build_app(make_service()))).status == 504


async def test_one_line_of_the_log_is_written(make_service: MakeService, caplog):
    logging.getLogger("tetrad.access").propagate = True
    caplog.set_level(logging.INFO, "tetrad.access")
    async with serving(make_service(access_log="json")) as place:
        app = HandOver(nobody, make_service(access_log="json"), place)
        await Call(raw(GENERATE)).to(app)
    (line,) = [json.loads(r.getMessage()) for r in caplog.records if r.name == "tetrad.access"]
    assert (line["client"], line["route"], line["status"]) == ("192.0.2.7", "/generate", 200)
    assert line["completion_tokens"] > 0


async def test_a_large_answer_comes_in_small_pieces(make_service: MakeService):
    answer = bytes(range(256)) * 4096

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": answer})

    async with serving(make_service(), app) as place:
        call = await Call(FILL, b"x").to(HandOver(nobody, make_service(), place))
    assert call.body == answer
    assert call.is_whole
    assert max(len(message["body"]) for message in call.sent[1:]) == PIECE_BYTES


async def test_who_is_slow_is_waited_for(make_service: MakeService):
    """The annex's application for its client, and the client for the application."""
    num_sent = 0
    goes_on = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal num_sent
        await receive()
        await goes_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000):
            num_sent += 1
            await send({"type": "http.response.body", "body": FILL, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async with serving(make_service(), app) as place:
        call = Call(*[FILL] * 100)
        call.reads.clear()
        task = asyncio.create_task(call.to(HandOver(nobody, make_service(), place)))
        await until(lambda: call.num_received > 0)
        await turns()
        assert call.num_received == 1
        goes_on.set()
        await until(lambda: num_sent > 0)
        await turns()
        assert num_sent < 20, "what nobody reads is kept"
        call.reads.set()
        await task
    assert len(call.body) == 1000 * len(FILL)


async def turns(num: int = 200) -> None:
    """So many of the event loop, with time in between for sockets."""
    for _ in range(num):
        await asyncio.sleep(0.0005)


@pytest.mark.parametrize("moment", ["in the body", "before the answer", "in the answer"])
async def test_who_leaves_is_noticed(moment: str, make_service: MakeService, engine: FakeEngine):
    engine.script = saying([18] * 200)
    body = raw(GENERATE | {"stream": True, "sampling_params": {"max_new_tokens": 200}})
    call = Call(body)
    has_come: Callable[[], bool]
    if moment == "in the body":
        call.lacks_bytes = True
        has_come = lambda: call.num_received == 1  # noqa: E731
    elif moment == "before the answer":
        engine.gate.clear()
        has_come = lambda: bool(engine.live)  # noqa: E731
    else:
        engine.step_s = 0.01
        has_come = lambda: len(call.sent) > 2  # noqa: E731
    async with serving(make_service()) as place:
        task = asyncio.create_task(call.to(HandOver(nobody, make_service(), place)))
        await until(has_come)
        call.left.set()
        await task
        await until(lambda: not engine.live)
    assert len(engine.aborted) == (0 if moment == "in the body" else 1)
    assert bool(call.sent) == (moment != "before the answer")
    assert HELD.total_bytes == 0


async def test_who_is_given_up_is_aborted(make_service: MakeService, engine: FakeEngine):
    """As when an API process ends, or dies: the annex sees the connection close."""
    engine.gate.clear()
    async with serving(make_service()) as place:
        call = Call(raw(GENERATE))
        task = asyncio.create_task(call.to(HandOver(nobody, make_service(), place)))
        await until(lambda: bool(engine.live))
        task.cancel()
        await until(lambda: not engine.live)
    assert engine.aborted


async def test_nobody_is_there(make_service: MakeService, monkeypatch: pytest.MonkeyPatch):
    """Neither a process that listens, nor one that takes what comes."""
    monkeypatch.setattr(handover, "PATIENCE_S", 0.05)
    service = make_service()
    app = build_app(service)
    call = await Call(raw({}), path="/v1/messages/").to(HandOver(app, service, "/nowhere"))
    assert (call.status, call.num_received) == (503, 0)
    headers = dict(call.sent[0]["headers"])
    assert headers[b"retry-after"] == b"5"
    assert headers[b"x-request-id"]
    assert json.loads(call.body)["error"]["type"] == "overloaded_error"
    with listening(has_annex=True) as listener:
        assert listener is not None
        call = await Call(raw({})).to(HandOver(app, service, listener.getsockname()))
    assert (call.status, call.num_received) == (503, 0)
    assert b"reads large bodies is not there" in call.body
    assert b'outcome="refused",route="/generate"} 1.0' in service.metrics.exposition()


async def test_who_comes_while_it_starts_is_served(make_service: MakeService):
    with listening(has_annex=True) as listener:
        assert listener is not None
        app = HandOver(nobody, make_service(), listener.getsockname())
        tasks = [asyncio.create_task(Call(raw(GENERATE)).to(app)) for _ in range(20)]
        await turns(20)
        server = AnnexServer(make_service(), listener)
        await server.listens()
        calls = await asyncio.gather(*tasks)
        await server.end()
    assert {call.status for call in calls} == {200}


async def test_it_dies_before_the_answer(make_service: MakeService):
    async with falling(make_service()) as app:
        call = await Call(raw(GENERATE)).to(app)
    assert call.status == 503
    assert b"has died" in call.body
    async with falling(make_service(), Ask()) as app:
        call = await Call(raw(GENERATE)).to(app)
    assert call.status == 503


async def test_it_dies_within_the_answer(make_service: MakeService):
    """Whoever called closes the connection then."""
    said = (Start(200, []), Piece(b"abc", has_more=True))
    async with falling(make_service(), *said) as app:
        call = await Call(raw(GENERATE)).to(app)
    assert call.body == b"abc"
    assert not call.is_whole


async def test_without_an_engine_nothing_is_handed_over(model: ServedModel):
    service = Service(ServeConfig(), model)
    call = await Call(raw(GENERATE)).to(HandOver(nobody, service, "/nowhere"))
    assert (call.status, call.num_received) == (503, 0)
    assert b"still loading" in call.body


async def test_it_ends_when_its_answers_are_whole(make_service: MakeService, engine: FakeEngine):
    engine.script = saying([18] * 20)
    engine.step_s = 0.01
    call = Call(raw(GENERATE | {"stream": True, "sampling_params": {"max_new_tokens": 20}}))
    async with serving(make_service()) as place:
        task = asyncio.create_task(call.to(HandOver(nobody, make_service(), place)))
        await until(lambda: len(call.sent) > 2)
        assert not task.done()
    await task
    assert call.body.endswith(b"data: [DONE]\n\n")
    assert call.is_whole


async def test_it_does_not_end_the_only_other_process(make_service: MakeService):
    """Which stands still here: it has never beaten."""
    service = make_service(api_workers=1)
    service.tally.put(IS_SERVING, 1.0)
    worker = Worker(service, lambda: AnnexServer(service, socket.socket()), 1)
    async with asyncio.timeout(10):
        await worker._watch_first(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 3, 4, 5, 1000])
async def test_frames_come_whole_wherever_they_are_torn(size: int):
    """Also if who listens gave up in between."""
    said = [Ready(), Piece(bytes(range(256)) * 3, has_more=True), Ask(), Gone(), Start(200, [])]
    sent = bytearray()

    class Writer:
        write = sent.__iadd__

        async def drain(self) -> None: ...

    for frame in said:
        await Line(None, Writer()).say(frame)  # type: ignore[arg-type]
    reader = asyncio.StreamReader()
    line = Line(reader, None)  # type: ignore[arg-type]
    heard: list[Frame] = []
    for piece in pieces(bytes(sent), size):
        reader.feed_data(piece)
        for _ in range(6):
            hearing = asyncio.create_task(line.hear())
            await turns(4)
            if not hearing.done():
                hearing.cancel()
                break
            heard.append(hearing.result())
    assert heard == said
    reader.feed_data(b"\0\0")
    reader.feed_eof()
    with pytest.raises(ConnectionError):
        await line.hear()
