"""Requests with grammars in the engine: they wait for theirs, nobody waits for them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from tests.engine.fakes import (
    EOS,
    VOCAB,
    FakeFoundry,
    FakeMaker,
    FakeRunner,
    expected_output,
    fake_allowed,
    make_limits,
    make_request,
    make_scheduler,
)
from tetrad.core.errors import CapacityError, RequestError
from tetrad.core.plan import StepPlan
from tetrad.core.request import MAX_GRAMMAR_BYTES, Grammar, SamplingParams
from tetrad.core.step import SequenceWork
from tetrad.engine.admission import end_ids
from tetrad.engine.engine import Engine
from tetrad.engine.grammars import Grammars
from tetrad.engine.sequence import Sequence

ANY = Grammar("regex", "any", "regex")
NUM_PAGES = 16


class Rig:
    """An engine with a fake grammar, and the order of what happens."""

    def __init__(self, *, delay: int = 0, **engine: Any) -> None:
        self.foundry, self.maker = FakeFoundry(delay), FakeMaker()
        self.runner = FakeRunner(NUM_PAGES)
        self.events: list[str] = []
        self.has_masks: list[bool] = []
        launch = self.runner.launch

        def noted(plan: StepPlan, masks: Any = None) -> Any:
            self.events.append("launch")
            self.has_masks.append(masks is not None)
            return launch(plan, masks)

        self.runner.launch = noted  # type: ignore[method-assign]
        scheduler = make_scheduler()
        apply = scheduler.apply

        def applied(result: Any) -> Any:
            self.events.append("apply")
            return apply(result)

        scheduler.apply = applied  # type: ignore[method-assign]
        self.engine = Engine(scheduler, self.runner, **engine)
        self.engine.grammars = Grammars(self.foundry, self.maker)
        self.tokens: dict[str, list[int]] = {}
        self.finishes: dict[str, Any] = {}

    def step(self) -> None:
        assert not self.engine.admit_ready()
        for output in self.engine.step():
            self.tokens.setdefault(output.rid, []).extend(output.token_ids)
            if output.finish:
                self.finishes[output.rid] = output.finish

    def run(self) -> None:
        while self.engine.has_work or self.engine.awaits_grammars:
            self.step()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("continuous_steps", [1, 4])
@pytest.mark.parametrize(
    "grammar", [ANY, Grammar("regex", "x", close_id=3), Grammar("regex", "x", close_id=99)]
)
def test_who_is_constrained_and_who_is_not_get_what_each_gets_alone(
    overlap: bool, continuous_steps: int, grammar: Grammar
):
    rig = Rig(overlap=overlap, continuous_steps=continuous_steps)
    requests = [
        make_request(f"r{i}", new=40, seed=i, grammar=grammar if i % 2 else None) for i in range(4)
    ]
    for request in requests:
        rig.engine.add(request)
    rig.run()
    for request in requests:
        assert rig.tokens[request.rid] == expected_output(request, request.sampling.seed or 0)
    assert not rig.maker.token_ids, "who ended is followed still"


def test_the_model_of_a_masked_step_is_launched_before_the_last_tokens_are_waited_for():
    rig = Rig()
    rig.engine.add(make_request("r", new=4, grammar=ANY))
    rig.run()
    assert rig.events == [
        "launch",
        "launch",
        "apply",
        "launch",
        "apply",
        "launch",
        "apply",
        "apply",
    ]
    assert rig.has_masks == [True] * 4


def test_steps_without_a_grammar_are_launched_as_ever():
    """Also while somebody reasons, or waits for his grammar."""
    rig = Rig(delay=3)
    rig.engine.add(make_request("plain", new=3))
    rig.engine.add(make_request("waits", new=3, grammar=ANY))
    for _ in range(3):
        rig.step()
    assert rig.tokens["plain"]
    assert "waits" not in rig.tokens
    assert rig.has_masks == [False] * 3
    rig.run()
    assert len(rig.tokens["waits"]) == 3


def test_nobody_waits_for_a_grammar_that_is_compiled():
    rig = Rig(delay=10**6)
    rig.engine.add(make_request("waits", grammar=ANY))
    assert not rig.engine.has_work
    assert rig.engine.awaits_grammars
    assert rig.engine.stats().waiting_requests == 1
    rig.engine.add(make_request("plain", new=3))
    for _ in range(6):
        rig.step()
    assert len(rig.tokens["plain"]) == 3
    rig.engine.abort("waits")
    assert not rig.engine.awaits_grammars


def test_a_grammar_that_cannot_be_is_refused_with_its_reason():
    rig = Rig()
    for rid, text in (("a", "bad"), ("b", "ours"), ("c", "fine")):
        rig.engine.add(make_request(rid, grammar=Grammar("regex", text, "guided_regex")))
    (bad, bad_error), (ours, ours_error) = rig.engine.admit_ready()
    assert (bad, ours) == ("a", "b")
    assert isinstance(bad_error, RequestError)
    assert (bad_error.http_status, bad_error.param) == (400, "guided_regex")
    assert str(bad_error) == "guided_regex cannot be used: it is bad."
    assert isinstance(ours_error, CapacityError)
    assert rig.engine.has_work


def test_where_a_grammar_ends_so_does_the_answer():
    limits = make_limits()
    endless = SamplingParams(ignore_eos=True, stop_token_ids=(9,))
    assert end_ids(endless, limits) == {9}
    assert end_ids(replace(endless, grammar=ANY), limits) == {9, EOS}


def test_what_can_be_refused_at_once_is():
    rig = Rig(delay=1)
    with pytest.raises(CapacityError):
        rig.engine.add(make_request("a", grammar=Grammar("regex", "too many")))
    with pytest.raises(RequestError, match="bytes"):
        rig.engine.add(
            make_request("a", grammar=Grammar("regex", "é" * (MAX_GRAMMAR_BYTES // 2 + 1)))
        )
    with pytest.raises(RequestError, match="prompt is empty"):
        rig.engine.add(make_request("a", [], grammar=ANY))
    assert rig.foundry.asked == ["too many"]
    rig.engine.add(make_request("a", grammar=ANY))
    for grammar in (ANY, None):  # let in without one, it would meet the other, and end the engine
        with pytest.raises(RequestError, match="already running"):
            rig.engine.add(make_request("a", grammar=grammar))
    without = Engine(make_scheduler(), FakeRunner(NUM_PAGES))
    with pytest.raises(RequestError, match="constrains no output"):
        without.add(make_request("a", grammar=ANY))


def test_who_takes_too_long_ends_and_the_others_do_not():
    rig = Rig()
    rig.engine.add(make_request("slow", new=9, grammar=ANY))
    rig.engine.add(make_request("good", new=9, seed=1, grammar=ANY))
    rig.maker.slow.add(0)
    rig.run()
    assert rig.finishes["slow"].reason == "error"
    assert "takes too long to follow" in rig.finishes["slow"].message
    assert rig.tokens["slow"] == []
    assert rig.finishes["good"].reason == "length"
    assert rig.tokens["good"] == expected_output(
        make_request("good", new=9, seed=1, grammar=ANY), 1
    )
    rig.engine.check_integrity()


@pytest.mark.parametrize("num_given", range(1, 5))
def test_who_takes_too_long_is_told_the_tokens_that_were_held_back(num_given: int):
    rig = Rig(stream_interval=3)
    request = make_request("slow", new=9, grammar=ANY)
    rig.engine.add(request)
    while rig.engine.scheduler.counters.generated_tokens < num_given:
        rig.step()
    rig.maker.slow.add(0)
    rig.run()
    assert rig.finishes["slow"].reason == "error"
    assert rig.tokens["slow"] == expected_output(request, 0)[: num_given + 1]


def test_the_reasoning_may_be_opened_by_the_answer_and_ended_by_a_call():
    """Open 11, close 12, call 13: the first token may be 11 or what the grammar allows."""
    grammar = Grammar("regex", "x", "regex", close_id=12, open_id=11, call_id=13)
    allowed = fake_allowed([])
    assert list(_phases(grammar, [11, 5, 12, 4])) == [None, None, allowed, fake_allowed([4])]
    assert list(_phases(grammar, [4])) == [fake_allowed([4])]
    assert list(_phases(grammar, [11, 13])) == [None, fake_allowed([13])]


def _phases(grammar: Grammar, token_ids: list[int]) -> Iterator[set[int] | None]:
    """After each token: what the mask allows, None without one."""
    maker = FakeMaker()
    grammars = Grammars(FakeFoundry(), maker)
    request = make_request("r", grammar=grammar)
    grammars.begin(request)
    assert grammars.ready() == [(request, None)]
    sequence = Sequence(request, 0, 0, frozenset())
    for token_id in token_ids:
        if grammars._answers["r"].phase == "first":
            masks, _ = grammars.masks(_plan(sequence))
            assert masks is not None
            assert masks.also == ((0, 11),)
        grammars._answers["r"].take(token_id)
        masks, _ = grammars.masks(_plan(sequence))
        if masks is None:
            yield None
        else:
            yield {i for i in range(VOCAB) if masks.words[i // 32] >> i % 32 & 1}


def _plan(sequence: Sequence) -> StepPlan:
    return StepPlan((SequenceWork("r", array("i", (1,)), 0, (0,), sequence.expect()),))
