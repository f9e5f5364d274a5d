"""Whom admission lets in: few are set back, nobody waits for ever, and memory does not lie idle."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.fakes import EOS, NoForecast, make_limits, make_request, make_scheduler, works_of
from tetrad.core.plan import StepResult
from tetrad.core.step import PAGE_TOKENS
from tetrad.engine.blocks import pages_for
from tetrad.engine.engine import SETBACKS_EVERY_S, Setbacks
from tetrad.engine.forecast import (
    AT_PEAK,
    MOST_SHARES,
    STEP_UP,
    Forecast,
    Growth,
    Outlook,
    peak_pages,
)
from tetrad.engine.running import Running
from tetrad.engine.scheduler import Scheduler
from tetrad.engine.sequence import CLIP_TOKENS, Sequence

GROWTHS = st.lists(
    st.builds(
        lambda remaining, tokens, slack, shared: Growth(
            remaining,
            tokens,
            pages := pages_for(tokens) + slack,
            max(0, pages - shared),
        ),
        st.integers(0, 300),
        st.integers(1, 300),
        st.integers(0, 1),
        st.integers(0, 5),
    ),
    min_size=1,
    max_size=12,
)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a load."""

    prompt: int
    most: int
    uses: int
    """Tokens after which the model ends it; more than `most`: it ends at its limit."""
    knows: bool = False
    """Does whoever asks say that only the limit ends it?"""


@dataclass(frozen=True, slots=True)
class Done:
    """What became of a load."""

    num_steps: int
    num_set_back: int
    computed: int
    """Tokens, those computed again included."""
    most_used: float
    """Mean share of the pages in use while anyone waited."""


def served(scheduler: Scheduler, load: list[Asked], most_steps: int = 200_000) -> Done:
    """Run a load that is all there at the beginning. Fails when it does not come to an end."""
    uses = {}
    for number, asked in enumerate(load):
        rid = str(number)
        uses[rid] = asked.uses
        prompt = [number % 30 + 8] * asked.prompt
        scheduler.add(make_request(rid, prompt, asked.most, ignore_eos=asked.knows))
    num_steps = computed = 0
    used: list[float] = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        computed += plan.num_tokens
        sampled = []
        for work in works_of(plan):
            if work.sample:
                is_last = work.sample.num_generated + 1 >= uses[work.rid]
                sampled.append(EOS if is_last else 0)
        if scheduler.waiting:
            used.append(scheduler.num_used_pages / scheduler.limits.num_pages)
        scheduler.apply(StepResult(np.array(sampled, np.int64)))
        num_steps += 1
        assert num_steps < most_steps, "it does not come to an end"
    mean = sum(used) / len(used) if used else 0.0
    return Done(num_steps, scheduler.counters.preemptions, computed, mean)


def scheduler_of(num_pages: int, *, has_forecast: bool, running: int = 64) -> Scheduler:
    limits = make_limits(num_pages, running=running, step=2048, context=8192)
    scheduler = make_scheduler(limits, use_prefix_cache=False)
    if not has_forecast:
        scheduler.forecast = NoForecast()
    return scheduler


def chats(count: int) -> list[Asked]:
    """Questions of some hundred tokens, answers that use a fifth of what they may, a few all."""
    rng = random.Random(0)
    return [
        Asked(rng.randint(50, 400), 1024, max(1, int(rng.lognormvariate(5.0, 0.8))))
        for _ in range(count)
    ]


def lengths(count: int) -> list[Asked]:
    """A load generator's: random lengths, which only their limit ends."""
    rng = random.Random(3)
    return [
        Asked(rng.randint(64, 256), rng.randint(64, 1024), 10_000, knows=True) for _ in range(count)
    ]


LOADS = {
    "equal": [Asked(128, 512, 10_000, knows=True)] * 200,
    "random": lengths(300),
    "chats": chats(300),
    "long chats": [replace(chat, most=4096, uses=5 * chat.uses) for chat in chats(200)],
    "half": [Asked(128, 1024, 30 if i % 2 else 2000) for i in range(200)],
}


@pytest.mark.parametrize(
    ("name", "share"), [("equal", 0.0), ("random", 0.0), ("long chats", 0.1), ("half", 0.7)]
)
def test_fewer_are_set_back(name: str, share: float):
    """Figures of 256 pages and at most 64 at once, printed for docs/log.md by `pytest -s`."""
    before = served(scheduler_of(256, has_forecast=False), LOADS[name])
    after = served(scheduler_of(256, has_forecast=True), LOADS[name])
    print(name, before, after, sep="\n  ")
    assert before.num_set_back > 50
    assert after.num_set_back <= share * before.num_set_back
    assert after.computed < before.computed


def test_where_nobody_would_be_set_back_little_room_is_kept():
    before = served(scheduler_of(256, has_forecast=False), LOADS["chats"])
    after = served(scheduler_of(256, has_forecast=True), LOADS["chats"])
    assert before.num_set_back == after.num_set_back == 0
    assert after.num_steps <= 1.05 * before.num_steps


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.builds(
            Asked, st.integers(1, 400), st.integers(1, 400), st.integers(1, 800), st.booleans()
        ),
        min_size=1,
        max_size=30,
    ),
    st.integers(13, 40),
    st.integers(1, 8),
)
def test_any_load_comes_to_its_end_in_the_order_of_arrival(
    load: list[Asked], num_pages: int, running: int
):
    """No deadlock: `served` ends. No starvation: nobody is admitted before an earlier one."""
    scheduler = scheduler_of(num_pages, has_forecast=True, running=running)
    first_run: list[int] = []
    admit = scheduler._admit

    def watched(sequence: Sequence, found: list[int]) -> None:
        admit(sequence, found)
        if sequence.arrival not in first_run:
            first_run.append(sequence.arrival)

    scheduler._admit = watched  # type: ignore[method-assign]
    done = served(scheduler, load, most_steps=sum(a.prompt + a.most + 2 for a in load) * 4)
    assert first_run == list(range(len(load)))
    assert done.num_steps > 0
    assert scheduler.num_used_pages == 0


def peak_of(growths: list[Growth]) -> int:
    return peak_pages(np.array(growths).T)


def running_of(*sequences: Sequence) -> Running:
    running = Running(make_limits(running=max(1, len(sequences))))
    for number, each in enumerate(sequences):
        each.place = (0, number, number)
        running.add(each)
    return running


@given(GROWTHS)
def test_the_peak_is_near_what_comes_token_by_token(growths: list[Growth]):
    """Each grows by a token at a time and gives back its own pages when it has all."""
    most = 0
    for time in range(max(growth.remaining for growth in growths) + 1):
        extra = 0
        for growth in growths:
            if growth.remaining >= time:
                extra += max(0, pages_for(growth.tokens + time) - growth.pages)
            else:
                extra -= growth.own_pages
        most = max(most, extra)
    found = peak_of(growths)
    assert found >= most - len(growths), "half a page each, and pages held beyond need"
    assert found <= most + len(growths)


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(1, 300)), min_size=2, max_size=12))
@settings(deadline=None)
def test_what_is_known_from_earlier_newcomers_changes_no_answer(sizes: list[tuple[int, int]]):
    """One after another come in; each time every number of free pages is answered like the peak."""
    forecast = Forecast()
    sequences = [
        sequence(most, 0, ends=number % 2 > 0, prompt=prompt)
        for number, (prompt, most) in enumerate(sizes)
    ]
    outlook = Outlook(forecast, running_of(sequences[0]))
    for number, newcomer in enumerate(sequences[1:], start=1):
        growths = [*map(forecast.growth, sequences[:number]), forecast.growth(newcomer, 0)]
        peak = peak_of(growths)
        for num_free in range(peak + 4):
            assert outlook.has_room_for(newcomer, 0, num_free) == (peak <= num_free)
        outlook.add(newcomer)


def test_nobody_looks_for_the_peak_where_all_have_room(monkeypatch: pytest.MonkeyPatch):
    """Letting in n beside n others took n sorts of n."""
    monkeypatch.setattr("tetrad.engine.forecast.peak_pages", None)
    outlook = Outlook(Forecast(), running_of(sequence(100, 0)))
    for _ in range(50):
        assert outlook.has_room_for(sequence(100, 0), 0, 1000)
        outlook.add(sequence(100, 0))


@pytest.mark.parametrize("num_pages", [8, 7])
def test_nothing_is_foreseen_where_all_fit_with_all_they_may_get(monkeypatch, num_pages: int):
    looks: list[Running] = []

    def outlook(forecast: Forecast, running: Running) -> Outlook:
        looks.append(running)
        return Outlook(forecast, running)

    monkeypatch.setattr("tetrad.engine.scheduler.Outlook", outlook)
    scheduler = make_scheduler(make_limits(num_pages, running=4, step=4 * PAGE_TOKENS))
    for rid in "abcd":
        scheduler.add(make_request(rid, PAGE_TOKENS, PAGE_TOKENS))
    num_admitted = len(works_of(scheduler.schedule()))
    assert (num_admitted == 4, bool(looks)) == (num_pages == 8, num_pages < 8)


def test_one_after_the_other_needs_less_than_all_at_once():
    long = Growth(640, 64, 1, 1)
    short = Growth(64, 640, 10, 10)
    assert peak_of([long]) == 10
    assert peak_of([short]) == 1
    assert peak_of([long, short]) == 3, "the long one grows into what the short one gives back"


def sequence(most: int, generated: int, *, ends: bool = True, prompt: int = 10) -> Sequence:
    request = make_request("a", prompt, most, ignore_eos=not ends)
    found = Sequence(request, 0, 0, frozenset({EOS} if ends else ()))
    for _ in range(generated):
        found.expect()
        found.add_token(0)
    return found


def test_what_finished_requests_used_is_learnt():
    forecast = Forecast()
    assert forecast.share == 0.7
    assert forecast.remaining(sequence(100, 0)) == 70 * AT_PEAK
    for _ in range(MOST_SHARES):
        forecast.finished(sequence(1000, 100))
    assert forecast.share == pytest.approx(0.1)
    assert forecast.remaining(sequence(1000, 20)) == 80 * AT_PEAK
    assert forecast.remaining(sequence(1000, 500)) == 500 * AT_PEAK, "nobody went so far before"
    for _ in range(MOST_SHARES // 2):
        forecast.finished(sequence(1000, 900))
    assert forecast.share == pytest.approx(0.5)
    assert forecast.remaining(sequence(1000, 0)) == 500 * AT_PEAK
    assert forecast.remaining(sequence(1000, 200)) == 700 * AT_PEAK, "as those that went beyond"


def test_a_limit_that_is_certain_is_taken_at_its_word():
    forecast = Forecast()
    forecast.finished(sequence(1000, 10, ends=False))
    assert forecast.share == 0.7, "and teaches nothing about others"
    assert forecast.remaining(sequence(20_000, 0, ends=False)) == 20_000
    assert forecast.remaining(sequence(20_000, 0)) <= CLIP_TOKENS


def test_who_is_set_back_raises_what_is_expected_for_a_while():
    forecast = Forecast()
    before = forecast.remaining(sequence(100, 0))
    forecast.set_back()
    assert forecast.remaining(sequence(100, 0)) == math.ceil(before + STEP_UP * (100 - before))
    for _ in range(20):
        forecast.set_back()
    assert forecast.remaining(sequence(100, 0)) == 100
    for _ in range(400):
        forecast.finished(sequence(100, 50))
    assert forecast.remaining(sequence(100, 0)) <= 50 * AT_PEAK + 1


def test_conservativeness_scales_what_is_expected():
    for factor, most in ((0.0, 0), (0.5, 50), (1.0, 100), (3.0, 100)):
        assert Forecast(factor).remaining(sequence(100, 0, ends=False)) == most


def test_who_was_refused_comes_in_once_its_prefix_is_there():
    """A page more to share makes room as an ended request does."""
    limits = make_limits(8, running=4, step=64)
    scheduler = make_scheduler(limits)
    scheduler.add(make_request("a", 3 * PAGE_TOKENS + 1, 60))
    scheduler.add(make_request("b", 3 * PAGE_TOKENS + 2, 60))
    admitted = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        works = works_of(plan)
        admitted.append(tuple(work.rid for work in works))
        num_sampled = sum(work.sample is not None for work in works)
        scheduler.apply(StepResult(np.zeros(num_sampled, np.int64)))
    assert ("a", "b") in admitted


def test_setbacks_are_told_now_and_then(caplog: pytest.LogCaptureFixture):
    now = [0.0]
    setbacks = Setbacks(lambda: now[0])
    for total in (0, 2, 3):
        setbacks.tell(total)
    now[0] = SETBACKS_EVERY_S
    setbacks.tell(7)
    setbacks.tell(7)
    first, second = (record.message for record in caplog.records)
    told = "requests were preempted {} times because the cache's pages ran out, {} "
    assert first.startswith(told.format(2, 2))
    assert second.startswith(told.format(5, 7))
