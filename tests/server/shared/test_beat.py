"""API processes that have stopped, or that cannot be started: who notices, and what health says."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from tests.server.conftest import MakeService, until
from tetrad.server.shared.beat import BEAT_S, MOST_LOST_STARTS, Watch, beat, why_unwell
from tetrad.server.shared.tally import BEAT_AT, IS_SERVING, Tally


def tallies(num: int) -> list[Tally]:
    """The same table as each process sees it."""
    first = Tally.shared(num)
    return [first, *(Tally(num, row, first.file) for row in range(1, num))]


async def test_an_event_loop_that_turns_beats():
    tally = Tally()
    task = asyncio.create_task(beat(tally))
    await until(lambda: tally.each(BEAT_AT)[0] > 0)
    first = tally.each(BEAT_AT)[0]
    await until(lambda: tally.each(BEAT_AT)[0] > first)
    task.cancel()


def test_who_stops_is_seen_after_so_many_looks():
    first, second, third = tallies(3)
    watch = Watch(first, 2 * BEAT_S)
    third.put(IS_SERVING, 1)
    second.put(IS_SERVING, 1)
    third.put(BEAT_AT, 7.0)
    seen = []
    for turn in range(4):
        second.put(BEAT_AT, 1.0 + turn)
        seen.append(watch.look([1, 2]))
    assert seen == [[], [], [2], [2]]
    third.put(BEAT_AT, 8.0)
    assert watch.look([1, 2]) == []


def test_who_does_not_serve_yet_has_not_stopped():
    first, _ = tallies(2)
    watch = Watch(first, BEAT_S)
    assert [watch.look([1]) for _ in range(5)] == [[]] * 5


def test_a_watcher_that_was_suspended_blames_nobody(monkeypatch: pytest.MonkeyPatch):
    """All beats are old then, by the clock."""
    first, second = tallies(2)
    second.put(IS_SERVING, 1)
    second.put(BEAT_AT, time.monotonic())
    watch = Watch(first, 20.0)
    assert watch.look([1]) == []
    monkeypatch.setattr(
        "tetrad.server.shared.beat.time", SimpleNamespace(monotonic=lambda: time.monotonic() + 3600)
    )
    assert watch.look([1]) == []


def test_a_first_process_that_has_stopped_is_told_by_the_others():
    first, second = tallies(2)
    assert why_unwell(second) is None
    first.put(BEAT_AT, time.monotonic())
    assert why_unwell(second) is None
    first.put(BEAT_AT, time.monotonic() - 60)
    assert why_unwell(second) == "API process 0 has been silent for 60 s"


def test_a_process_that_cannot_start_is_told_until_it_serves():
    first, second = tallies(2)
    first.bury(1, MOST_LOST_STARTS - 1)
    assert why_unwell(first) is None
    first.bury(1, MOST_LOST_STARTS)
    assert "API process 1 could not be started 3 times in a row" in str(why_unwell(first))
    second.put(IS_SERVING, 1)
    assert why_unwell(first) is None


def test_health_looks_at_the_other_processes(make_service: MakeService):
    service = make_service()
    assert service.why_unhealthy is None
    service.tally.put(BEAT_AT, time.monotonic() - 60)
    assert "API process 0 has been silent" in str(service.why_unhealthy)
