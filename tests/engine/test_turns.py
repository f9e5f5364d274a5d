"""Streams are told in turns that leave time for others, and nobody is told late or out of order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tetrad.core.errors import TetradError
from tetrad.core.request import RequestOutput
from tetrad.engine.sinks import Stream
from tetrad.engine.turns import MOST_REST_S, MUCH_DUE, TURN_S, Turns


class Loop:
    """An event loop whose time passes when it is told to, or when somebody is told something."""

    def __init__(self) -> None:
        self.now = 100.0
        self.soon: list[Callable[[], None]] = []
        self.later: list[tuple[float, Callable[[], None]]] = []

    def call_soon(self, call: Callable[[], None]) -> None:
        self.soon.append(call)

    def call_later(self, delay_s: float, call: Callable[[], None]) -> SimpleNamespace:
        timer = (self.now + delay_s, call)
        self.later.append(timer)
        return SimpleNamespace(cancel=lambda: self.later.remove(timer))

    def turn(self) -> None:
        soon, self.soon = self.soon, []
        for call in soon:
            call()

    def wait(self) -> None:
        """Until the first timer, which comes a little early: uvloop rounds to milliseconds."""
        at, call = self.later.pop(0)
        self.now = at - 0.0002
        call()


class Told:
    """A sink that takes `cost_s` of the loop's time for whatever it is told."""

    def __init__(self, loop: Loop, cost_s: float) -> None:
        self.loop, self.cost_s = loop, cost_s
        self.heard: list[Any] = []

    def take(self, output: RequestOutput) -> None:
        self.loop.now += self.cost_s
        self.heard.append(output)

    def take_tokens(self, token_ids: Sequence[int]) -> None:
        self.loop.now += self.cost_s
        self.heard.append(list(token_ids))

    def fail(self, error: TetradError) -> None:
        raise AssertionError(error)


class Served:
    """Turns, and streams of which each takes `cost_s` to be told."""

    def __init__(self, num_streams: int, cost_s: float) -> None:
        self.loop = Loop()
        self.turns = Turns(self.loop, lambda: self.loop.now)  # type: ignore[arg-type]
        self.told = [Told(self.loop, cost_s) for _ in range(num_streams)]
        self.streams = [Stream(n, str(n), sink) for n, sink in enumerate(self.told)]

    def step(self, token_id: int) -> None:
        """A token for each."""
        for stream in self.streams:
            self.turns.token(stream, token_id)
        self.turns.go()

    def output(self, index: int, token_id: int) -> None:
        self.turns.output(self.streams[index], RequestOutput(str(index), (token_id,)))
        self.turns.go()


def test_what_comes_at_leisure_is_told_at_once():
    served = Served(4, 0.0001)
    for token_id in range(3):
        served.step(token_id)
        assert [told.heard[-1] for told in served.told] == [[token_id]] * 4
        served.loop.now += 0.0005
    assert not served.loop.soon
    assert not served.loop.later


def test_what_comes_while_tokens_rest_is_told_together_afterwards():
    served = Served(4, 0.0001)
    for token_id in range(3):
        served.step(token_id)
    assert [told.heard for told in served.told] == [[[0]]] * 4
    assert [at for at, _ in served.loop.later] == [pytest.approx(100.0008)]
    served.loop.wait()
    assert [told.heard for told in served.told] == [[[0], [1, 2]]] * 4
    assert not served.loop.later


def test_a_rest_is_short_however_long_it_took():
    served = Served(100, 0.001)
    served.step(0)
    while served.loop.soon:
        served.loop.turn()
    assert served.loop.now == pytest.approx(100.1)
    served.step(1)
    assert [at for at, _ in served.loop.later] == [pytest.approx(100.1 + MOST_REST_S)]


def test_whoever_has_nothing_to_hand_out_does_not_end_a_rest():
    """A heartbeat, or what only begins somebody."""
    served = Served(10, 0.0001)
    served.step(0)
    served.turns.go()
    served.output(3, 7)
    served.step(1)
    assert [told.heard for told in served.told[:3]] == [[[0]]] * 3
    assert [at for at, _ in served.loop.later] == [pytest.approx(100.002)]


def test_the_end_of_one_rest_is_not_that_of_the_next():
    """A message may come after a rest before its timer does."""
    served = Served(10, 0.0001)
    served.step(0)
    served.step(1)
    served.loop.now = 100.0021
    served.step(2)
    assert served.told[0].heard == [[0], [1, 2]]
    served.step(3)
    assert [at for at, _ in served.loop.later] == [pytest.approx(100.0041)]


def test_who_begins_or_ends_does_not_rest_and_keeps_the_order():
    served = Served(4, 0.0001)
    served.step(0)
    served.step(1)
    served.output(2, 7)
    *before, output = served.told[2].heard
    assert before == [[0], [1]]
    assert output.token_ids == (7,)
    assert served.told[0].heard == [[0]]
    served.loop.wait()
    assert served.told[0].heard == [[0], [1]]
    assert len(served.told[2].heard) == 3


def test_a_turn_is_short_and_the_next_goes_on():
    served = Served(10, 0.0009)
    served.step(0)
    num_turns = 1
    while served.loop.soon:
        assert served.loop.now <= 100.0 + num_turns * (TURN_S + 0.0009)
        served.turns.go()  # a message that comes meanwhile takes no turn of its own
        served.loop.turn()
        num_turns += 1
    assert num_turns == 4
    assert [told.heard for told in served.told] == [[[0]]] * 10


def test_outputs_of_one_stream_are_told_one_at_a_time():
    """Each may be the whole answer so far."""
    served = Served(1, 2 * TURN_S)
    (told,), (stream,) = served.told, served.streams
    for number in range(3):
        served.turns.output(stream, RequestOutput(str(number), (number,)))
    served.turns.token(stream, 3)
    served.turns.go()
    for number in range(1, 4):
        assert len(told.heard) == number
        served.loop.turn()
    assert [output.rid for output in told.heard[:3]] == ["0", "1", "2"]
    assert told.heard[3:] == [[3]]


def test_much_that_is_due_is_noticed():
    served = Served(1, 0.0)
    for number in range(MUCH_DUE + 1):
        assert not served.turns.is_behind
        served.turns.output(served.streams[0], RequestOutput(str(number), (number,)))
    assert served.turns.is_behind
    served.turns.go()
    assert not served.turns.is_behind
