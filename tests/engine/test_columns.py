"""Decodes as columns against the same as structs: what a step does to all at once is what it does
to one after the other."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.fakes import (
    FakeRunner,
    NoForecast,
    expected_output,
    make_limits,
    make_request,
    make_scheduler,
)
from tests.engine.test_overlap import WAYS, requests
from tetrad.core.request import RequestOutput
from tetrad.core.step import PAGE_TOKENS
from tetrad.engine.engine import Engine
from tetrad.engine.running import Running
from tetrad.engine.sequence import NEVER, Sequence

PLAIN = {"num_logprobs": None, "repetition_penalty": 1.0}

events = st.lists(
    st.one_of(
        st.tuples(requests, st.integers(0, 1)),
        st.tuples(requests, st.integers(0, 1)),
        st.integers(1, 60),  # steps
        st.integers(-9, -1),  # an abort
        st.sampled_from(["set back", "spoil"]),
    ),
    min_size=5,
    max_size=20,
)


class Side:
    """An engine; a reference treats every request as one of which there is more to say."""

    def __init__(self, limits: tuple[int, int, int], how: dict[str, int], **kind: bool) -> None:
        num_pages, running, step = limits
        self.is_reference = kind["is_reference"]
        self.runner = FakeRunner(num_pages)
        scheduler = make_scheduler(
            make_limits(num_pages, running=running, step=step, context=450),
            use_prefix_cache=kind["has_cache"],
            preemption_threshold=0,
        )
        if not kind["has_forecast"]:
            scheduler.forecast = NoForecast()
        self.engine = Engine(scheduler, self.runner, **how)  # type: ignore[arg-type]
        self.num_decodes = 0

    def add(self, rid: str, fields: dict[str, Any], priority: int) -> None:
        self.engine.add(make_request(rid, priority=priority, **fields))
        if self.is_reference:
            self.engine.scheduler._live[rid].plain_from = NEVER

    def step(self) -> list[RequestOutput]:
        outputs = self.engine.step()
        self.engine.check_integrity()
        self.num_decodes += sum(len(s.decodes) for s in self.engine.scheduler._planned)
        return sorted(outputs, key=lambda output: output.rid)

    def standing(self) -> list[Any]:
        """All that both sides must agree on after each step."""
        scheduler = self.engine.scheduler
        cache, names = scheduler.cache, dict[int, int]()
        return [
            [self._of(each, names) for each in scheduler.running],
            [self._of(each, names) for each in scheduler.waiting],
            *(scheduler.counters, cache.num_idle, cache.num_available, len(cache._page_of)),
        ]

    def _of(self, one: Sequence, names: dict[int, int]) -> list[Any]:
        """Pages go by the order in which they are met: which ones are shared, not their numbers."""
        counts = list(one.counts)
        return [
            *(one.request.rid, counts, one.token_ids, one.num_kept, one.num_preemptions),
            [names.setdefault(page, len(names)) for page in one.pages],
        ]


@given(
    script=events,
    limits=st.tuples(st.integers(5, 9), st.integers(1, 7), st.integers(3, 200)),
    how=st.sampled_from(WAYS),
    has_cache=st.booleans(),
    has_forecast=st.booleans(),
    are_all_plain=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_columns_do_what_structs_do(
    script: list[Any],
    limits: tuple[int, int, int],
    how: dict[str, int],
    has_cache: bool,
    has_forecast: bool,
    are_all_plain: bool,
):
    """But for the numbers of pages: who ends in one step gives them back in another order where one
    decodes and another computes its prompt."""
    kind = {"has_cache": has_cache, "has_forecast": has_forecast}
    sides = [Side(limits, how, is_reference=is_one, **kind) for is_one in (False, True)]
    ours, theirs = sides

    def step() -> None:
        heard = [side.step() for side in sides]
        assert [(o.rid, o.token_ids, o.finish, o.logprobs) for o in heard[0]] == [
            (o.rid, o.token_ids, o.finish, o.logprobs) for o in heard[1]
        ]
        assert ours.standing() == theirs.standing()

    for number, event in enumerate(script):
        live = sorted(ours.engine.scheduler._live)
        for side in sides:
            if isinstance(event, tuple):
                fields = event[0] | (PLAIN if are_all_plain else {})
                side.add(f"r{number}", fields, event[1])
            elif event == "set back":
                side.engine.set_back()
            elif event == "spoil" and live:
                side.runner.spoiled.add(live[number % len(live)])
            elif isinstance(event, int) and event < 0 and live:
                side.engine.abort(live[event % len(live)])
        for _ in range(event if isinstance(event, int) else 0):
            step()
    while ours.engine.has_work:
        step()
    assert not theirs.engine.has_work
    assert theirs.num_decodes == 0


def test_a_first_token_is_told_in_full_though_a_decode_samples_it():
    """The last token of a prompt in chunks is one token behind, like any decode."""
    scheduler, runner = make_scheduler(make_limits(16, step=96)), FakeRunner(16)
    scheduler.add(make_request("a", 97, new=3))
    gains = [scheduler.apply(runner.launch(scheduler.schedule()).wait()) for _ in range(4)]
    assert [(len(gain.token_ids), len(gain.outputs)) for gain in gains] == [
        *((0, 0), (0, 1), (1, 0), (0, 1)),
    ]
    assert gains[1].outputs[0].queue_s > 0
    assert scheduler.cache.num_idle == 1, "its full page was kept"


def test_nothing_of_a_request_outlives_it():
    """What rows keep from one step to the next names sequences, and so whole prompts."""

    def num_sequences() -> int:
        gc.collect()
        return sum(type(found) is Sequence for found in gc.get_objects())

    before = num_sequences()
    engine = Engine(make_scheduler(make_limits(16)), FakeRunner(16), overlap=False)
    for number in range(3):
        engine.add(make_request(f"r{number}", 10 + number, new=20))
    for _ in range(6):
        engine.step()
    assert num_sequences() == before + 3
    engine.end(None)
    assert num_sequences() == before


def test_rows_are_given_back_and_their_tokens_kept():
    """A sequence that leaves and comes back has all its tokens, and no page of its last stay."""
    limits = make_limits(16, running=2)
    scheduler, runner = make_scheduler(limits), FakeRunner(16)
    scheduler.add(make_request("a", 10, new=150))
    for _ in range(100):
        scheduler.apply(runner.launch(scheduler.schedule()).wait())
    (sequence,) = scheduler.running
    rows, row = scheduler.running.rows, sequence.row
    assert sequence.num_known == 110
    assert sequence.num_known - len(sequence._listed) < PAGE_TOKENS, "some are listed already"
    scheduler.set_back()
    assert (sequence.row, len(sequence._listed), [*sequence.counts]) == (-1, 110, [110, 110, 0])
    assert not rows.pages[row].any()
    assert rows.sequences[row] is None
    scheduler.apply(runner.launch(scheduler.schedule()).wait())
    assert sequence.row == row
    assert sequence.num_known == 111


def test_a_step_is_computed_again_though_one_of_it_has_ended_and_another_has_its_row():
    scheduler, runner = make_scheduler(make_limits(16, running=2, step=300)), FakeRunner(16)
    told = expected_output(make_request("a", 10), 0)
    assert told[0] != told[1]
    scheduler.add(make_request("a", 10, new=9, stop_token_ids=(told[1],)))
    scheduler.add(make_request("b", 12, new=9))
    steps = [runner.launch(scheduler.schedule()) for _ in range(3)]
    for step in steps[:2]:
        scheduler.apply(step.wait())
    (left,) = scheduler.running
    scheduler.add(make_request("c", 150, new=9))
    scheduler.schedule()
    assert left.row != scheduler.running.last.row
    a, b = scheduler.as_replay().sequences
    assert (a.rid, a.token_ids.tolist(), a.pages) == ("a", [0], (16,))
    assert (b.rid, b.token_ids.tolist()) == ("b", expected_output(make_request("b", 12), 0)[1:2])


@pytest.mark.parametrize("num_pages", [1, 16, 17, 300])
def test_a_page_table_grows_to_the_longest(num_pages: int):
    running = Running(make_limits(num_pages + 1, running=2))
    short, long = (Sequence(make_request(rid), 0, 0, frozenset()) for rid in "ab")
    for place, sequence in enumerate((short, long)):
        sequence.place = (0, 0, place)
        running.add(sequence)
    running.rows.add_pages(short, (7,))
    running.rows.add_pages(long, tuple(range(1, num_pages + 1)))
    table = running.rows.pages
    assert table[long.row, :num_pages].tolist() == list(range(1, num_pages + 1))
    assert table[short.row, :2].tolist() == [7, 0]
    assert np.array_equal(running.order, [short.row, long.row])
