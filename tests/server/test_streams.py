"""Over a real socket: clients that leave, engines that die, and nothing that stays behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from tests.server.conftest import until
from tests.server.fake_engine import FakeEngine, Step, saying
from tetrad.core.request import Finish, Request
from tetrad.server.service import Service
from tetrad.server.stream import answers, choices, push
from tetrad.server.stream.session import Delta
from tetrad.server.wire import pace

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "3"}], "max_tokens": 100}


async def first_line(response: httpx.Response) -> str:
    async for line in response.aiter_lines():
        return line
    raise AssertionError("the stream ended without a line")


async def test_leaving_a_stream_aborts_its_requests(
    address: str, engine: FakeEngine, service: Service
):
    engine.script, engine.step_s = saying([18]), 0.01
    async with (
        httpx.AsyncClient(base_url=address) as client,
        client.stream(
            "POST", CHAT, json=BODY | {"stream": True, "n": 3, "ignore_eos": True}
        ) as response,
    ):
        await first_line(response)
        assert len(engine.live) == 3
    await until(lambda: not engine.live)
    assert len(engine.aborted) == 3
    assert (service.open_requests, service.unanswered_requests) == (0, 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_before_the_first_token_aborts_too(
    address: str, engine: FakeEngine, service: Service, stream: bool
):
    engine.gate.clear()
    async with httpx.AsyncClient(base_url=address) as client:
        task = asyncio.create_task(client.post(CHAT, json=BODY | {"stream": stream}))
        await until(lambda: bool(engine.live))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await until(lambda: not engine.live)
    assert len(engine.aborted) == 1
    assert (service.open_requests, service.unanswered_requests) == (0, 0)
    assert 'outcome="cancelled",route="/v1/chat/completions"} 1.0' in (
        service.metrics.exposition().decode()
    )


@pytest.mark.parametrize("route", [CHAT, "/v1/completions", "/generate"])
async def test_an_engine_that_dies_mid_stream_is_an_error_event_without_done(
    address: str, engine: FakeEngine, route: str
):
    engine.script, engine.step_s = saying([18]), 0.01
    body = BODY | {"prompt": "3", "text": "3", "stream": True, "ignore_eos": True}
    body["sampling_params"] = {"ignore_eos": True, "max_new_tokens": 200}
    async with (
        httpx.AsyncClient(base_url=address) as client,
        client.stream("POST", route, json=body) as response,
    ):
        assert response.status_code == 200
        lines = response.aiter_lines()
        await anext(lines)
        engine.kill("The engine ran out of luck.")
        rest = [line async for line in lines if line]
    error = json.loads(rest[-1].removeprefix("data: "))["error"]
    assert error["message"] == "The engine ran out of luck."
    assert error["type"] == "server_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_dies_before_the_first_token_is_a_503(
    address: str, engine: FakeEngine, stream: bool
):
    engine.gate.clear()
    async with httpx.AsyncClient(base_url=address) as client:
        task = asyncio.create_task(client.post(CHAT, json=BODY | {"stream": stream}))
        await until(lambda: bool(engine.live))
        engine.kill("The engine ran out of luck.")
        response = await task
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "The engine ran out of luck."


async def test_logits_that_are_not_finite_fail_their_request_only(
    address: str, engine: FakeEngine, service: Service
):
    bad = Step((), Finish("error", message="Logits were not finite at layer 3."))

    def script(request: Request) -> list[Step]:
        return [bad] if request.sampling.seed == 1 else [Step((18,)), bad]

    engine.script = script
    async with httpx.AsyncClient(base_url=address) as client:
        response = await client.post(CHAT, json=BODY | {"seed": 1, "stream": True})
        assert response.status_code == 500
        assert "not finite at layer 3" in response.text
        response = await client.post(CHAT, json=BODY | {"seed": 2, "stream": True})
        assert response.status_code == 200
        assert "not finite at layer 3" in response.text.split("\n\n")[-2]
        engine.script = saying([18])
        assert (await client.post(CHAT, json=BODY)).status_code == 200
    assert 'outcome="failed",route="/v1/chat/completions"} 2.0' in (
        service.metrics.exposition().decode()
    )


async def test_many_streams_of_which_a_third_leave(
    address: str, engine: FakeEngine, service: Service
):
    engine.step_s = 0.002
    limits = httpx.Limits(max_connections=None)

    async def one(client: httpx.AsyncClient, number: int) -> None:
        text = f"{number} " * 10
        body = {"text": text, "stream": True, "sampling_params": {"max_new_tokens": 100}}
        async with client.stream("POST", "/generate", json=body) as response:
            last = ""
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    last = json.loads(line.removeprefix("data: "))["text"]
                    if number % 3 == 0 and len(last) > 5:
                        return
        assert last == text

    async with httpx.AsyncClient(base_url=address, limits=limits, timeout=60) as client:
        await asyncio.gather(*(one(client, number) for number in range(60)))
        await until(lambda: not engine.live)
    assert len(engine.aborted) == 20
    assert (service.open_requests, service.unanswered_requests) == (0, 0)


async def test_a_half_sent_body_is_given_up_with_its_connection(address: str, engine: FakeEngine):
    host, port = address.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    async with httpx.AsyncClient(base_url=address) as client:
        assert (await client.get("/health")).status_code == 200
    assert engine.seen == []
    del reader


async def test_what_came_together_is_written_together(monkeypatch: pytest.MonkeyPatch):
    """A task that begins late finds tokens waiting: a write for each would cost more than they."""

    async def generate(*_: object) -> choices.Deltas:
        yield [(0, Delta(content="a"))]
        yield [(0, Delta(content="b")), (1, Delta()), (0, Delta(content="c"))]
        yield [(1, Delta())]

    monkeypatch.setattr(choices, "generate", generate)

    def render(index: int, delta: Delta) -> bytes:
        return f"{index}{delta.content} ".encode() if delta.content else b""

    found = choices.pieces(None, "", (), None, render)  # type: ignore[arg-type]
    assert [piece async for piece in found] == [b"0a ", b"0b 0c "]


async def test_long_events_are_written_one_by_one_and_others_have_their_turns(monkeypatch):
    """What a slow client has left waiting would be one write of hundreds of megabytes."""
    monkeypatch.setattr(pace, "SHARE_S", 1e-9)
    turns: list[int] = []
    rendered: list[int] = []

    async def other() -> None:
        while len(rendered) < 64:
            turns.append(len(rendered))
            await asyncio.sleep(0)

    def render(index: int, _delta: Delta) -> bytes:
        rendered.append(index)
        return bytes(push.MOST_BYTES // 2)

    task = asyncio.create_task(other())
    found = push.together(render, [(n, Delta()) for n in range(64)])
    assert [len(piece) async for piece in found] == [push.MOST_BYTES] * 32
    await task
    assert len(turns) > 60


async def test_an_error_comes_after_what_came_before_it():
    inbox = push.Inbox()
    for text in "abc":
        inbox.put((0, Delta(content=text)))
    inbox.put(ValueError("over"))
    assert [delta.content for _, delta in await inbox.get()] == ["a", "b", "c"]
    with pytest.raises(ValueError, match="over"):
        await inbox.get()


async def test_pieces_that_wait_already_do_not_keep_others_waiting(monkeypatch: pytest.MonkeyPatch):
    """All of an answer may be there when a slow client leaves: that it left must be heard before
    the rest is written for nobody."""
    monkeypatch.setattr(pace, "SHARE_S", 1e-9)
    num_sent = 0
    inbox = push.Inbox()
    for _ in range(100 * push.MOST_AT_ONCE):
        inbox.put((0, Delta()))

    async def pieces(_: object) -> AsyncGenerator[bytes, None]:
        while found := await inbox.get():
            async for piece in push.together(lambda *_: b"data: x\n\n", found):
                yield piece

    async def send(_: Any) -> None:
        nonlocal num_sent
        num_sent += 1

    async def receive() -> dict[str, str]:
        await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    await answers.EventStream(pieces)({}, receive, send)
    assert 1 <= num_sent < 10
