"""Who is served next: priorities, keys that take turns, and what is set back for whom."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.engine.fakes import make_limits, make_request, make_scheduler
from tests.engine.test_scheduler import Bench
from tetrad.core.request import Request
from tetrad.engine.scheduler import Scheduler


def served_in_order(scheduler: Scheduler, requests: list[Request]) -> list[str]:
    """Rids by their first token, everybody having come at once."""
    bench = Bench(scheduler)
    bench.run(*requests)
    return list(bench.tokens)


def one_at_a_time() -> Scheduler:
    return make_scheduler(make_limits(running=1))


def test_higher_priority_goes_first_and_equal_ones_by_arrival():
    asked = [make_request(f"{p}{i}", new=2, priority=p) for i in range(2) for p in (0, 5, -3)]
    assert served_in_order(one_at_a_time(), asked) == ["50", "51", "00", "01", "-30", "-31"]


def test_keys_take_turns():
    """One that sent ten keeps another waiting for one of them, not for ten."""
    many = [make_request(f"a{i}", new=2, key_name="a") for i in range(5)]
    few = [make_request(f"b{i}", new=2, key_name="b") for i in range(2)]
    found = served_in_order(one_at_a_time(), [*many, *few])
    assert found == ["a0", "b0", "a1", "b1", "a2", "a3", "a4"]


def test_turns_that_a_key_left_out_are_lost():
    """After a silence it takes its turn, and no more than that."""
    bench = Bench(one_at_a_time())
    for i in range(20):
        bench.scheduler.add(make_request(f"a{i}", new=2, key_name="a"))
    while "a9" not in bench.finish:
        bench.step()
    for i in range(5):
        bench.scheduler.add(make_request(f"b{i}", new=2, key_name="b"))
    bench.run()
    after = list(bench.tokens)[10:]
    assert after[:8] in (
        ["b0", "a10", "b1", "a11", "b2", "a12", "b3", "a13"],
        ["a10", "b0", "a11", "b1", "a12", "b2", "a13", "b3"],
    )


def test_a_lane_that_was_empty_begins_behind_those_that_run():
    """Else one that is preempted would find itself behind a newcomer."""
    bench = Bench(make_scheduler(make_limits(running=2)))
    for i in range(6):
        bench.scheduler.add(make_request(f"a{i}", new=3))
    while "a4" not in bench.tokens:
        bench.step()
    bench.run(make_request("late", new=30))
    assert list(bench.tokens)[-1] == "late"


@pytest.mark.parametrize("num_flooding", [1, 3])
def test_a_key_s_wait_depends_on_the_number_of_keys_not_on_what_others_send(num_flooding: int):
    """An overloaded server: some keys send ten times what one may get, one key sends little. Its
    requests wait for about a turn of each other key; first come, first served would have them wait
    behind hundreds."""
    scheduler = make_scheduler(make_limits(64, running=4, step=256))
    bench, rng, step = Bench(scheduler), random.Random(3), 0
    came: dict[str, int] = {}
    waits: dict[str, list[int]] = {}
    done: Counter[str] = Counter()

    def ask(key: str) -> None:
        rid = f"{key}-{len(came)}"
        came[rid] = step
        scheduler.add(make_request(rid, 8, new=8, key_name=key))

    for step in range(600):
        for number in range(num_flooding):
            if rng.random() < 2.0 / num_flooding:
                ask(f"flood{number}")
        if step % 20 == 0:
            ask("quiet")
        before = set(bench.tokens)
        bench.step()
        for rid in set(bench.tokens) - before:
            key = rid.split("-")[0]
            waits.setdefault(key, []).append(step - came[rid])
            done[key] += 1
    assert len(scheduler.waiting) > 200, "the server was not overloaded"
    assert len(waits["quiet"]) == 30
    assert max(waits["quiet"]) <= 4 * (num_flooding + 1), waits["quiet"]
    assert max(waits["flood0"]) > 100
    floods = [done[f"flood{number}"] for number in range(num_flooding)]
    assert max(floods) - min(floods) <= 2, "equal keys get equal shares"


def displacing(threshold: int | None) -> Bench:
    """Two run with priority 0 on two places."""
    limits = make_limits(running=2)
    bench = Bench(make_scheduler(limits, preemption_threshold=threshold))
    for rid in "ab":
        bench.scheduler.add(make_request(rid, new=20))
    bench.step()
    return bench


@pytest.mark.parametrize(("priority", "is_in"), [(10, False), (11, True)])
def test_a_much_higher_priority_sets_the_last_back(priority: int, is_in: bool):
    bench = displacing(10)
    urgent = make_request("urgent", new=4, priority=priority)
    bench.scheduler.add(urgent)
    bench.step()
    assert ("urgent" in bench.tokens) == is_in
    assert [s.request.rid for s in bench.scheduler.waiting] == (["b"] if is_in else ["urgent"])
    counters = bench.scheduler.counters
    assert (counters.preemptions, counters.shortages) == (is_in, 0)
    bench.run()
    bench.assert_undisturbed(urgent, make_request("a", new=20), make_request("b", new=20))


def test_without_a_threshold_nobody_is_set_back():
    bench = displacing(None)
    bench.scheduler.add(make_request("urgent", priority=1000))
    bench.step()
    assert [s.request.rid for s in bench.scheduler.running] == ["a", "b"]


def test_nobody_is_set_back_in_vain():
    """The urgent one needs more pages than those below it hold."""
    limits = make_limits(7, running=4, step=512)
    bench = Bench(make_scheduler(limits, preemption_threshold=0))
    bench.scheduler.add(make_request("high", 130, new=40, priority=5))
    bench.scheduler.add(make_request("low", [1] * 5, new=40))
    bench.step()
    assert len(bench.scheduler.running) == 2
    bench.scheduler.add(make_request("urgent", [2] * 300, priority=3))
    bench.step()
    assert [s.request.rid for s in bench.scheduler.running] == ["high", "low"]


def test_the_wait_is_told_with_the_first_token_only():
    scheduler = one_at_a_time()
    bench = Bench(scheduler)
    scheduler.add(make_request("a", new=3))
    scheduler.add(make_request("b", new=3))
    told: dict[str, list[float]] = {"a": [], "b": []}
    while scheduler.has_work:
        for output in scheduler.apply(bench.runner.launch(scheduler.schedule()).wait()):
            told[output.rid].append(output.queue_s)
    assert [wait > 0 for wait in told["b"]] == [True, False, False]
    assert told["a"][0] < told["b"][0]
