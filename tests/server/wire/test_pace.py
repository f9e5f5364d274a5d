"""Long work takes turns: who asks something small waits for one piece of it, much is due."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest.mock import Mock
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.server.conftest import until
from tests.server.fake_engine import FakeEngine, saying
from tests.server.test_bad_input import json_values
from tetrad.core.request import Request, RequestOutput
from tetrad.server.apis.native import generate as native
from tetrad.server.door.arrival import Arrival, arrival, begin
from tetrad.server.http.connections import Body
from tetrad.server.model import MANY_TEXTS
from tetrad.server.stream.answers import PART_BYTES, LaterJson
from tetrad.server.stream.push import MOST_BYTES, ChoiceReader, Inbox, ShortWay
from tetrad.server.stream.session import Delta, Session
from tetrad.server.text.logprobs import native_logprobs
from tetrad.server.text.tokenizer import Tokenizer
from tetrad.server.wire import pace
from tetrad.server.wire.encoding import GrowingList, grown_event, json_bytes, json_pieces
from tetrad.server.wire.pace import FREE_PASSES, SHARE_S, Pace, in_turn

LONG_S = SHARE_S * 1.2
NUM_STREAMS = 8


class Passes:
    """How many passes the event loop has made."""

    def __init__(self) -> None:
        self.num = 0
        self._is_over = False
        self._count()

    def _count(self) -> None:
        self.num += 1
        if not self._is_over:
            asyncio.get_running_loop().call_soon(self._count)

    def end(self) -> None:
        self._is_over = True


class Works:
    """Work whose time passes on a clock of its own; remembers in which pass each was done."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pace = Pace(asyncio.get_running_loop(), lambda: self.now)
        self.passes = Passes()
        self.done: list[tuple[str, int]] = []

    def work(self, name: str, took_s: float) -> Callable[[], str]:
        def do() -> str:
            self.now += took_s
            self.done.append((name, self.passes.num))
            return name

        return do

    async def do(self, name: str, took_s: float) -> str:
        return await self.pace.take(self.work(name, took_s))


async def test_a_pass_begins_no_more_than_its_share_and_others_are_free():
    works = Works()
    names = [str(number) for number in range(9)]
    assert await asyncio.gather(*(works.do(name, SHARE_S * 0.6) for name in names)) == names
    works.passes.end()
    assert [name for name, _ in works.done] == names
    at = [number for _, number in works.done]
    assert at[0] == at[1]
    assert at[2] == at[3] > at[1] + FREE_PASSES
    assert at[8] > at[7] + FREE_PASSES


async def test_short_work_does_not_wait():
    works = Works()
    for number in range(100):
        await works.do(str(number), SHARE_S / 1000)
    works.passes.end()
    assert {number for _, number in works.done} == {works.done[0][1]}


async def test_who_has_left_the_line_is_not_served_and_who_fails_alone_hears_of_it():
    works = Works()

    def fail() -> None:
        raise ValueError("spoiled")

    tasks = [asyncio.create_task(works.do(name, LONG_S)) for name in "ab"]
    failing = asyncio.create_task(works.pace.take(fail))
    last = asyncio.create_task(works.do("c", LONG_S))
    await asyncio.sleep(0)
    tasks[1].cancel()
    works.pace.take_later(works.work("d", LONG_S))
    with pytest.raises(ValueError, match="spoiled"):
        await failing
    await last
    await works.do("e", LONG_S)
    works.passes.end()
    assert [name for name, _ in works.done] == ["a", "c", "d", "e"]


async def test_work_that_waits_knows_whose_it_is():
    async def serve(name: str) -> str:
        begin(Arrival(name))

        def work() -> str:
            time.sleep(LONG_S)
            return arrival().request_id

        return await in_turn(work)

    names = ["a", "b", "c"]
    assert await asyncio.gather(*map(serve, names)) == names


async def test_health_waits_for_one_piece_of_work_whatever_is_due(address: str):
    """From the connection to the answer takes the loop several passes."""
    parts = urlsplit(address)
    with socket.create_connection((parts.hostname, parts.port or 0)) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        client.setblocking(False)
        num_done, answer = 0, b""

        def work() -> None:
            nonlocal num_done, answer
            time.sleep(LONG_S)
            try:
                answer = answer or client.recv(4096)
            except BlockingIOError:
                num_done += 1

        async def ask_for_much() -> None:
            while not answer:
                await in_turn(work)

        await asyncio.gather(*(ask_for_much() for _ in range(NUM_STREAMS)))
    assert answer.startswith(b"HTTP/1.1 200")
    assert num_done <= 2


def stream(client: httpx.AsyncClient, num_tokens: int, **fields: Any) -> Any:
    sampling = {"max_new_tokens": num_tokens, "ignore_eos": True}
    body = {"text": "3", "stream": True, "sampling_params": sampling, **fields}
    return client.post("/generate", json=body)


async def test_long_events_of_several_streams_are_not_built_in_one_pass(
    address: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Body, "is_open", False)  # as it is where a client reads slowly
    engine.script = saying([18])
    engine.info["max_running_requests"] = NUM_STREAMS
    built_at: list[int] = []
    passes = Passes()
    build = grown_event

    def slow(value: Any) -> bytes:
        built_at.append(passes.num)
        time.sleep(LONG_S)
        return build(value)

    monkeypatch.setattr(native, "grown_event", slow)
    async with httpx.AsyncClient(base_url=address) as client:
        found = await asyncio.gather(*(stream(client, 4) for _ in range(NUM_STREAMS)))
    passes.end()
    assert all(answer.text.endswith("data: [DONE]\n\n") for answer in found)
    assert len(built_at) == 4 * NUM_STREAMS
    assert all(later > sooner + FREE_PASSES for sooner, later in pairwise(built_at))


async def test_what_was_told_is_not_encoded_again(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    """An event holds all of its answer so far, so its building would take the longer the longer
    that is."""
    engine.script = saying([18])
    num_encoded = 0

    def counted(values: Any, num_top: int) -> Any:
        nonlocal num_encoded
        num_encoded += len(values)
        return native_logprobs(values, num_top)

    monkeypatch.setattr(native, "native_logprobs", counted)
    answer = await stream(client, 50, return_logprob=True, top_logprobs_num=2)
    told = [json.loads(line[6:])["meta_info"] for line in answer.text.split("\n\n")[:-2]]
    assert [len(each["output_top_logprobs"]) for each in told] == list(range(1, 51))
    assert num_encoded == 50


@given(st.lists(st.lists(json_values, max_size=4), max_size=4), json_values)
def test_lists_that_grew_are_written_as_any_other(added: list[list[Any]], other: Any):
    grown = GrowingList()
    for values in added:
        grown.add(values)
    flat = [value for values in added for value in values]

    def value(items: Any) -> Any:
        return {"a": other, "b": items, "c": [items, other]}

    assert b"".join(json_pieces(grown)) == json_bytes(flat)
    assert b"".join(json_pieces(value(grown))) == json_bytes(value(flat))


async def test_a_large_answer_is_sent_in_parts():
    grown = GrowingList()
    grown.add(["x" * 3 * PART_BYTES, "y"])
    value = {"a": grown, "b": [GrowingList()] * 9}

    async def work() -> Any:
        return value

    async def receive() -> Any:
        await asyncio.Event().wait()

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await LaterJson(work)({}, receive, send)
    start, *parts = sent
    body = b"".join(part["body"] for part in parts)
    assert body == b"".join(json_pieces(value))
    assert dict(start["headers"])[b"content-length"] == str(len(body)).encode()
    assert [part["more_body"] for part in parts] == [True] * (len(parts) - 1) + [False]
    assert len(parts) > 2
    assert max(len(part["body"]) for part in parts) < 2 * PART_BYTES


async def test_requests_of_many_choices_begin_and_leave_in_turns(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pace, "SHARE_S", 1e-9)
    begun, left = list[tuple[str, int]](), list[tuple[str, int]]()
    passes = Passes()

    def begin_one(request: Request, _sink: Any) -> Callable[[], None]:
        begun.append((request.rid.partition("-")[0], passes.num))
        return lambda: left.append((request.rid.partition("-")[0], passes.num))

    monkeypatch.setattr(engine, "begin", begin_one)
    sampling = {"n": 3, "max_new_tokens": 9}
    tasks = [
        asyncio.create_task(
            client.post("/generate", json={"text": "3", "rid": rid, "sampling_params": sampling})
        )
        for rid in "abc"
    ]
    await until(lambda: len(begun) == 9)
    for task in tasks:
        task.cancel()
    await until(lambda: len(left) == 9)
    passes.end()
    for told in (begun, left):
        at = [{number for rid, number in told if rid == name} for name in "abc"]
        assert [len(each) for each in at] == [1, 1, 1]
        first, second, third = sorted(at, key=max)
        assert max(first) + FREE_PASSES < min(second)
        assert max(second) + FREE_PASSES < min(third)


class Pieces:
    """An outlet of a client that takes whatever comes."""

    is_open = True

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, piece: bytes) -> None:
        self.written.append(piece)


async def test_of_many_long_events_the_task_sees_all_but_the_first(tokenizer: Tokenizer):
    """They would be built and written in one go."""
    outlet, inbox, rendered = Pieces(), Inbox(), list[Delta]()

    def render(_index: int, delta: Delta) -> bytes:
        rendered.append(delta)
        return bytes(MOST_BYTES)

    watch: Any = Mock()
    reader = ChoiceReader(Session(tokenizer), 0, watch, Mock(), inbox, ShortWay(render, outlet))
    reader.take(RequestOutput("r", (18,)))
    assert len(await inbox.get()) == 1
    task = asyncio.create_task(inbox.get())
    await asyncio.sleep(0)
    reader.take_tokens([18, 19, 20, 21])
    assert list(map(len, outlet.written)) == [MOST_BYTES]
    assert [delta.token_ids for delta in rendered] == [[18]]
    assert [delta.token_ids for _, delta in await task] == [[19], [20], [21]]


async def test_many_texts_are_tokenised_beside_the_loop(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    engine.script = saying([18])
    threads: list[bool] = []
    encode = Tokenizer.encode_all

    def noted(*given: Any, **named: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return encode(*given, **named)

    monkeypatch.setattr(Tokenizer, "encode_all", noted)
    for num_texts in (MANY_TEXTS, MANY_TEXTS + 1):
        body = {"prompt": ["3"] * num_texts, "max_tokens": 1}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
    assert threads == [True, False]
