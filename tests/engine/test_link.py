"""An API process reads what the engine says, and tells it who has left, in turns of the event loop
that leave time for others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.fakes import make_limits, make_request
from tetrad.core.errors import RequestError, TetradError
from tetrad.core.messages import AbortRequests, EngineReady, EngineStats, Heartbeat, Message
from tetrad.engine.link import EngineLink
from tetrad.engine.sinks import Outputs
from tetrad.engine.turns import TURN_S
from tetrad.engine.wire import encode


class Talker:
    """A socket on which there is always something to read."""

    def __init__(self, socket: Any) -> None:
        self.num_read = 0
        self._close = socket.close

    def recv(self, _flags: int) -> bytes:
        self.num_read += 1
        return encode(Heartbeat(0.0, EngineStats()))

    def close(self, linger: int | None = None) -> None:
        self._close(linger)


class Turns:
    """Counts how often it may go on."""

    def __init__(self) -> None:
        self.num = 0
        self.is_behind = False

    def go(self) -> None:
        self.num += 1


@pytest.fixture
async def joined(tmp_path: Path) -> AsyncIterator[EngineLink]:
    joined = EngineLink(str(tmp_path), 1)
    joined._open()
    joined._receive(EngineReady({}, make_limits()))
    yield joined
    await joined._close()


@pytest.fixture
def turns(joined: EngineLink) -> Turns:
    turns = Turns()
    joined._turns = turns  # type: ignore[assignment]
    return turns


async def test_reading_goes_on_once_in_each_turn(joined: EngineLink, turns: Turns):
    """However often it is told that there is something."""
    joined._incoming = talker = Talker(joined._incoming)  # type: ignore[assignment]
    for number in range(1, 4):
        for _ in range(3):
            joined._read()
        assert turns.num == number
        await asyncio.sleep(0)
    assert talker.num_read > 3


async def test_a_turn_ends_after_its_time_whatever_is_there(
    joined: EngineLink, turns: Turns, monkeypatch: pytest.MonkeyPatch
):
    now = 0.0

    def passing() -> float:
        nonlocal now
        now += TURN_S / 10
        return now

    monkeypatch.setattr(time, "monotonic", passing)
    joined._incoming = talker = Talker(joined._incoming)  # type: ignore[assignment]
    joined._read()
    assert 1 <= talker.num_read < 10
    assert turns.num == 1


async def test_what_cannot_be_handed_out_yet_is_not_read(joined: EngineLink, turns: Turns):
    joined._incoming = talker = Talker(joined._incoming)  # type: ignore[assignment]
    turns.is_behind = True
    joined._read()
    await asyncio.sleep(0)
    assert (talker.num_read, turns.num) == (0, 2)
    turns.is_behind = False
    await asyncio.sleep(0)
    assert talker.num_read > 0


async def test_who_leaves_in_one_turn_is_told_of_in_one_message(
    joined: EngineLink, monkeypatch: pytest.MonkeyPatch
):
    said: list[Message] = []
    monkeypatch.setattr(joined, "_send", said.append)
    leaves = [joined.begin(make_request(name), Outputs(name)) for name in "abc"]
    await asyncio.sleep(0)
    said.clear()
    for leave in leaves[:2]:
        leave()
    assert not said
    await asyncio.sleep(0)
    assert said == [AbortRequests(["1.1.a", "1.2.b"])]


async def test_what_can_never_be_served_is_refused_without_the_engine(
    joined: EngineLink, monkeypatch: pytest.MonkeyPatch
):
    said: list[Message] = []
    monkeypatch.setattr(joined, "_send", said.append)
    told: list[TetradError] = []

    class Heard(Outputs):
        def fail(self, error: TetradError) -> None:
            told.append(error)

    for rid in "ab":
        leave = joined.begin(make_request(rid, 5, top_p=2.0), Heard(rid))
        assert not told, "before who asks knows how to leave"
    leave()
    leave()
    await asyncio.sleep(0)
    (error,) = told
    assert isinstance(error, RequestError)
    assert (error.param, error.http_status) == ("top_p", 400)
    assert not said
