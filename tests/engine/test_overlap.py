"""Planning a step before the last one is taken in changes nothing that a client can see."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.fakes import (
    EOS,
    VOCAB,
    Done,
    FakeRunner,
    NoForecast,
    expected_output,
    make_limits,
    make_request,
    make_scheduler,
    works_of,
)
from tetrad.core.plan import StepPlan
from tetrad.core.request import Finish, Request, RequestOutput, TokenLogprob
from tetrad.engine import engine
from tetrad.engine.engine import Engine
from tetrad.engine.grammars import Masks


@dataclass
class Told:
    """What a client heard of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None
    prompt_tokens: int = 0


class Client:
    """Runs an engine and keeps what it says."""

    def __init__(self, num_pages: int = 8, running: int = 4, step: int = 96, **how: int) -> None:
        limits = make_limits(num_pages, running=running, step=step, context=450)
        self.runner = FakeRunner(num_pages)
        self.engine = Engine(make_scheduler(limits), self.runner, **how)  # type: ignore[arg-type]
        self.told: dict[str, Told] = {}

    def add(self, request: Request) -> None:
        self.engine.add(request)
        self.told[request.rid] = Told()

    def step(self) -> list[RequestOutput]:
        outputs = list(self.engine.step())
        for output in outputs:
            told = self.told[output.rid]
            assert told.finish is None
            told.token_ids += output.token_ids
            told.logprobs += output.logprobs
            told.finish, told.prompt_tokens = output.finish, output.prompt_tokens
        self.engine.check_integrity()
        return outputs

    def drain(self) -> None:
        while self.engine.has_work:
            self.step()


WAYS = [
    {"overlap": False},
    {"overlap": True},
    {"overlap": False, "continuous_steps": 8},
    {"overlap": True, "continuous_steps": 3, "stream_interval": 4},
]

requests: st.SearchStrategy[dict[str, object]] = st.builds(
    dict,
    prompt=st.integers(1, 130),
    new=st.integers(1, 20) | st.integers(100, 190),
    ignore_eos=st.sampled_from([True, True, False]),
    seed=st.integers(0, 3),
    temperature=st.sampled_from([0.0, 1.0]),
    min_new_tokens=st.integers(0, 20),
    stop_token_ids=st.lists(st.integers(0, 3 * VOCAB), max_size=2).map(
        lambda ids: tuple(i for i in ids if i < VOCAB)
    ),
    num_logprobs=st.sampled_from([None, 0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.2]),
)
events = st.lists(
    st.one_of(
        requests,
        requests,
        st.integers(1, 30),  # steps
        st.integers(-9, -1),  # an abort
    ),
    min_size=5,
    max_size=20,
)


def play(client: Client, script: list[dict[str, object] | int]) -> set[str]:
    """Returns who was aborted before the end."""
    aborted = set()
    for number, event in enumerate(script):
        if isinstance(event, dict):
            client.add(make_request(f"r{number}", **event))  # type: ignore[arg-type]
        elif event > 0:
            for _ in range(event):
                client.step()
        elif client.told:
            rid = sorted(client.told)[event % len(client.told)]
            client.engine.abort(rid)
            if client.told[rid].finish is None:
                aborted.add(rid)
    client.drain()
    return aborted


def assert_as_expected(told: Told, request: Request) -> None:
    sampling = request.sampling
    tokens = expected_output(request, sampling.seed or 0)
    assert told.token_ids == tokens
    ends = {*sampling.stop_token_ids} | (set() if sampling.ignore_eos else {EOS})
    last = tokens[-1]
    assert told.finish == (Finish("stop", last) if last in ends else Finish("length"))
    assert told.prompt_tokens == len(request.prompt_ids)
    if sampling.num_logprobs is None:
        assert told.logprobs == []
    else:
        known = [*request.prompt_ids, *tokens]
        past = [sum(known[:end]) for end in range(len(request.prompt_ids), len(known))]
        assert told.logprobs == [
            TokenLogprob(i, -float(p)) for i, p in zip(tokens, past, strict=True)
        ]


@given(
    script=events,
    num_pages=st.integers(5, 7),
    running=st.integers(1, 6),
    step=st.integers(6, 200),
    how=st.sampled_from(WAYS),
)
@settings(max_examples=200)
def test_every_way_gives_each_request_what_it_gets_alone(
    script: list[dict[str, object] | int],
    num_pages: int,
    running: int,
    step: int,
    how: dict[str, int],
):
    client = Client(num_pages, running, step, **how)
    aborted = play(client, script)
    for number, event in enumerate(script):
        if not isinstance(event, dict):
            continue
        told = client.told[f"r{number}"]
        request = make_request(f"r{number}", **event)  # type: ignore[arg-type]
        if request.rid in aborted:
            whole = expected_output(request, request.sampling.seed or 0)
            assert told.token_ids == whole[: len(told.token_ids)]
        else:
            assert_as_expected(told, request)
    assert client.engine.flush_cache()
    assert client.engine.stats().used_pages == 0


def plans_of(client: Client, num_steps: int) -> list[StepPlan]:
    """What the runner is told, step call by step call."""
    plans: list[StepPlan] = []
    launch = client.runner.launch

    def noted(plan: StepPlan, masks: Callable[[], Masks | None] | None = None) -> Done:
        plans.append(plan)
        return launch(plan, masks)

    client.runner.launch = noted  # type: ignore[method-assign]
    for _ in range(num_steps):
        client.step()
    return plans


def test_a_step_is_launched_before_the_last_one_is_taken_in():
    client = Client(overlap=True)
    client.add(make_request("a", 10))
    first, second = plans_of(client, 2)
    assert works_of(first)[0].token_ids[-1] >= 0
    assert works_of(second)[0].token_ids.tolist() == [-1]
    assert len(client.told["a"].token_ids) == 1


def test_no_step_is_wasted_on_a_request_that_reaches_its_limit():
    client = Client(overlap=True)
    client.add(make_request("a", 10, new=5))
    assert len(plans_of(client, 9)) == 5
    assert client.told["a"].finish == Finish("length")


def test_a_stop_shows_one_step_late_and_the_token_after_it_is_passed_over():
    request = make_request("a", 10, new=50, stop_token_ids=(12,))
    num_tokens = len(expected_output(request, 0))
    assert 1 < num_tokens < 50
    client = Client(overlap=True)
    client.add(request)
    assert len(plans_of(client, 60)) == num_tokens + 1
    assert_as_expected(client.told["a"], request)
    assert client.engine.stats().generated_tokens_total == num_tokens


@pytest.mark.parametrize("length", [10, 63, 64, 150])
@pytest.mark.parametrize("continuous_steps", [1, 3])
def test_what_follows_logits_that_are_not_finite_is_passed_over(length: int, continuous_steps: int):
    """The step after them reads a token that nobody chose, and may give any, and finite logits."""
    client = Client(overlap=True, continuous_steps=continuous_steps)
    a, b = make_request("a", length, new=20), make_request("b", length + 40, new=20, seed=1)
    client.add(a)
    client.step()
    client.step()
    client.runner.spoiled.add("a")
    client.step()
    client.runner.spoiled.clear()
    client.add(b)
    client.drain()
    told = client.told["a"]
    assert told.finish
    assert told.finish.reason == "error"
    assert 0 < len(told.token_ids) < 20
    assert told.token_ids == expected_output(a, 0)[: len(told.token_ids)]
    assert_as_expected(client.told["b"], b)


def test_an_id_that_comes_again_does_not_get_the_tokens_of_the_first():
    client = Client(overlap=True)
    client.add(make_request("a", 10, new=50))
    client.step()
    client.step()
    client.engine.abort("a")
    again = make_request("a", 20, new=4, seed=1)
    client.add(again)
    client.drain()
    assert_as_expected(client.told["a"], again)


def test_penalties_wait_for_their_tokens(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    engine._tell_once.cache_clear()
    client = Client(overlap=True, continuous_steps=4)
    client.add(make_request("a", 10, new=6, frequency_penalty=0.5))
    assert all(min(plan.sequences[0].token_ids) >= 0 for plan in plans_of(client, 8))
    assert client.told["a"].finish is not None
    assert [record.message for record in caplog.records] == [engine.SINGLE_STEPS]


@pytest.mark.parametrize(("steps", "calls"), [(1, 17), (4, 5), (8, 3)])
def test_continuous_steps_are_launched_between_two_schedulings(steps: int, calls: int):
    client = Client(overlap=True, continuous_steps=steps)
    client.add(make_request("a", 10, new=16))
    scheduled = 0
    schedule = client.engine.scheduler.schedule

    def counted() -> StepPlan:
        nonlocal scheduled
        scheduled += 1
        return schedule()

    client.engine.scheduler.schedule = counted  # type: ignore[method-assign]
    client.drain()
    assert scheduled == calls
    assert client.engine.stats().steps_total == 16


def test_continuous_steps_leave_others_their_pages():
    client = Client(num_pages=2, overlap=True, continuous_steps=60)
    client.add(make_request("a", 60, new=60))
    client.add(make_request("b", 60, new=60))
    client.drain()
    for rid in "ab":
        assert_as_expected(client.told[rid], make_request(rid, 60, new=60))


def test_tokens_are_handed_out_by_the_interval():
    client = Client(overlap=False, stream_interval=4)
    client.add(make_request("a", 10, new=11))
    outputs = []
    while client.engine.has_work:
        outputs += client.step()
    assert [len(output.token_ids) for output in outputs] == [1, 4, 4, 2]
    assert [output.finish is not None for output in outputs] == [False, False, False, True]


def test_an_abort_drops_what_is_held():
    client = Client(overlap=False, stream_interval=4)
    client.add(make_request("a", 10, new=11))
    client.step()
    client.step()
    client.engine.abort("a")
    client.add(make_request("a", 10, new=1))
    (output,) = client.step()
    assert len(output.token_ids) == 1


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("stops", [(), tuple(range(0, VOCAB, 20))])
def test_who_is_preempted_with_a_token_on_its_way_loses_nothing(
    how: dict[str, int], stops: tuple[int, ...]
):
    num_preemptions = 0
    for length in range(40, 72):
        client = Client(num_pages=5, **how)
        client.engine.scheduler.forecast = NoForecast()
        wanted = [
            make_request(f"{i}", length + i, new=190, seed=i, stop_token_ids=stops)
            for i in range(4)
        ]
        for request in wanted:
            client.add(request)
        client.drain()
        for request in wanted:
            assert_as_expected(client.told[request.rid], request)
        num_preemptions += client.engine.stats().preemptions_total
    assert num_preemptions > 0
