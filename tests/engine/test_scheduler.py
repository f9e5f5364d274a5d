"""Scheduling with plain numbers: no model, no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
from msgspec.structs import replace

from tests.engine.fakes import (
    EOS,
    VOCAB,
    FakeRunner,
    NoForecast,
    expected_output,
    make_limits,
    make_request,
    make_scheduler,
    works_of,
)
from tetrad.core.errors import RequestError
from tetrad.core.plan import StepPlan
from tetrad.core.request import Finish, Request, RequestOutput
from tetrad.core.step import PAGE_TOKENS
from tetrad.engine.engine import Engine
from tetrad.engine.prefix import names_of
from tetrad.engine.scheduler import Scheduler


class Bench:
    """A scheduler with a fake runner, stepped by hand; keeps what came out."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.runner = FakeRunner(scheduler.limits.num_pages)
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, Finish] = {}
        self.last: dict[str, RequestOutput] = {}

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        for output in self.scheduler.apply(self.runner.launch(plan).wait()):
            self.tokens.setdefault(output.rid, []).extend(output.token_ids)
            self.last[output.rid] = output
            if output.finish:
                self.finish[output.rid] = output.finish
        self.scheduler.check_integrity()
        return plan

    def run(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)
        while self.scheduler.has_work:
            self.step()

    def assert_undisturbed(self, *requests: Request) -> None:
        for request in requests:
            assert request.sampling.seed is not None
            assert self.tokens[request.rid] == expected_output(request, request.sampling.seed)


def work_of(plan: StepPlan) -> list[tuple[str, int, int]]:
    """(rid, start, number of tokens) of each sequence."""
    return [(w.rid, w.start, len(w.token_ids)) for w in works_of(plan)]


def test_the_scheduler_does_not_import_torch():
    code = (
        "import sys, tetrad.engine.scheduler, tetrad.engine.client; print('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


def test_a_long_prompt_is_computed_in_chunks_beside_a_decode():
    bench = Bench(make_scheduler(make_limits(step=96)))
    bench.scheduler.add(make_request("a", 10))
    assert work_of(bench.step()) == [("a", 0, 10)]
    bench.scheduler.add(make_request("b", 200))
    assert work_of(bench.step()) == [("a", 10, 1), ("b", 0, 95)]
    assert work_of(bench.step()) == [("a", 11, 1), ("b", 95, 95)]
    plan = bench.step()
    assert work_of(plan) == [("a", 12, 1), ("b", 190, 10)]
    assert [w.sample is not None for w in works_of(plan)] == [True, True]
    assert work_of(bench.step()) == [("a", 13, 1), ("b", 200, 1)]


def test_a_partly_computed_prompt_samples_nothing():
    bench = Bench(make_scheduler(make_limits(step=96)))
    bench.scheduler.add(make_request("a", 97))
    assert bench.step().sequences[0].sample is None
    assert not bench.tokens


@pytest.mark.parametrize("step", [1, 7, 64, 500])
def test_any_chunk_size_gives_the_same_tokens(step: int):
    bench = Bench(make_scheduler(make_limits(step=step)))
    requests = [make_request("a", 130), make_request("b", 64), make_request("c", 1)]
    bench.run(*requests)
    bench.assert_undisturbed(*requests)


def test_first_come_first_served():
    bench = Bench(make_scheduler(make_limits(running=2)))
    for rid in "abc":
        bench.scheduler.add(make_request(rid, new=3))
    assert [w.rid for w in works_of(bench.step())] == ["a", "b"]
    bench.step()
    bench.step()
    assert [w.rid for w in works_of(bench.step())] == ["c"]


def test_a_large_request_at_the_front_is_not_overtaken():
    bench = Bench(make_scheduler(make_limits(4, running=4, step=512)))
    bench.scheduler.add(make_request("a", 100, new=20))
    bench.step()
    bench.scheduler.add(make_request("big", 180))
    bench.scheduler.add(make_request("small", 3))
    assert work_of(bench.step()) == [("a", 100, 1)]
    assert bench.scheduler.waiting.first.request.rid == "big"


def test_a_repeated_prompt_is_taken_from_the_cache_but_for_its_last_token():
    bench = Bench(make_scheduler())
    bench.run(make_request("a", 2 * PAGE_TOKENS))
    bench.scheduler.add(make_request("b", 2 * PAGE_TOKENS))
    assert work_of(bench.step()) == [("b", PAGE_TOKENS, PAGE_TOKENS)]
    assert bench.last["b"].cached_tokens == PAGE_TOKENS
    bench.run()
    assert bench.tokens["a"] == bench.tokens["b"]


def test_a_running_sequence_shares_its_prefix():
    bench = Bench(make_scheduler())
    bench.scheduler.add(make_request("a", 3 * PAGE_TOKENS, new=50))
    while "a" not in bench.tokens:
        bench.step()
    bench.scheduler.add(make_request("b", 3 * PAGE_TOKENS + 5))
    plan = bench.step()
    pages = {w.rid: w.pages for w in works_of(plan)}
    assert pages["a"][:3] == pages["b"][:3]


def test_output_is_cached_too():
    bench = Bench(make_scheduler())
    first = make_request("a", 60, new=70)
    bench.run(first)
    second = make_request("b", [*first.prompt_ids, *bench.tokens["a"], 1])
    bench.run(second)
    assert bench.last["b"].cached_tokens == 2 * PAGE_TOKENS
    bench.assert_undisturbed(second)


@pytest.mark.parametrize("num_named", [0, 1, 3])
def test_names_that_come_with_a_prompt_are_taken_and_those_that_lack_are_found(num_named: int):
    bench, plain = Bench(make_scheduler()), make_request("a", 3 * PAGE_TOKENS + 1)
    bench.run(plain)
    named = replace(plain, rid="b", page_names=names_of(plain.prompt)[:num_named])
    bench.run(named)
    assert bench.last["b"].cached_tokens == 3 * PAGE_TOKENS
    bench.run(replace(named, rid="c", page_names=(b"of another page", *named.page_names[1:])))
    assert bench.last["c"].cached_tokens == 0
    bench.assert_undisturbed(named)


def test_a_disabled_cache_computes_everything():
    bench = Bench(make_scheduler(use_prefix_cache=False))
    bench.run(make_request("a", 200))
    bench.run(make_request("b", 200))
    assert bench.last["b"].cached_tokens == 0
    assert bench.scheduler.cache.num_idle == 0


def test_the_youngest_is_preempted_and_gives_the_same_tokens():
    bench = Bench(make_scheduler(make_limits(5, step=512), use_prefix_cache=False))
    bench.scheduler.forecast = NoForecast()
    requests = [make_request("a", 60, new=130), make_request("b", 60, new=150, seed=5)]
    bench.run(*requests)
    assert bench.last["a"].num_preemptions == 0
    assert bench.last["b"].num_preemptions >= 1
    counters = bench.scheduler.counters
    assert counters.shortages == counters.preemptions == bench.last["b"].num_preemptions
    bench.assert_undisturbed(*requests)


def test_a_preempted_request_returns_before_those_that_waited():
    bench = Bench(make_scheduler(make_limits(4, running=2), use_prefix_cache=False))
    bench.scheduler.forecast = NoForecast()
    for rid, new in (("a", 140), ("b", 140), ("c", 1)):
        bench.scheduler.add(make_request(rid, 40, new=new))
    while not bench.scheduler.counters.preemptions:
        bench.step()
    assert [s.request.rid for s in bench.scheduler.running] == ["a"]
    assert [s.request.rid for s in bench.scheduler.waiting] == ["b", "c"]


def test_admission_leaves_a_page_for_each_that_runs():
    bench = Bench(make_scheduler(make_limits(3, step=512)))
    bench.scheduler.add(make_request("a", 64, new=5))
    bench.scheduler.add(make_request("b", 128, new=5))
    assert [w.rid for w in works_of(bench.step())] == ["a"]


def test_idle_pages_that_are_to_be_shared_are_not_counted_as_room():
    bench = Bench(make_scheduler(make_limits(4, step=512)))
    bench.run(make_request("a", 129))
    bench.scheduler.add(make_request("b", [9] * 120))
    bench.step()
    bench.scheduler.add(make_request("c", 129))
    assert [w.rid for w in works_of(bench.step())] == ["b"]
    bench.run()
    assert bench.last["c"].cached_tokens == 2 * PAGE_TOKENS


def test_idle_cached_pages_make_room():
    bench = Bench(make_scheduler(make_limits(4, step=512)))
    bench.run(make_request("a", 200))
    request = make_request("b", [9] * 250)
    bench.run(request)
    bench.assert_undisturbed(request)


@pytest.mark.parametrize("num_steps", range(6))
def test_abort_frees_everything_at_any_moment(num_steps: int):
    bench = Bench(make_scheduler(make_limits(8, running=2, step=64)))
    for rid in "abc":
        bench.scheduler.add(make_request(rid, 150, new=3))
    for _ in range(num_steps):
        bench.step()
    for rid in ("c", "a", "b", "unknown"):
        bench.scheduler.abort(rid)
        bench.scheduler.check_integrity()
    assert not bench.scheduler.has_work
    assert bench.scheduler.num_used_pages == 0
    assert bench.scheduler.flush_cache()
    assert bench.scheduler.cache.pool.num_free == 8


def test_an_abort_between_schedule_and_apply_is_passed_over():
    bench = Bench(make_scheduler())
    bench.scheduler.add(make_request("a"))
    bench.scheduler.add(make_request("b"))
    plan = bench.scheduler.schedule()
    bench.scheduler.abort("a")
    outputs = bench.scheduler.apply(bench.runner.launch(plan).wait())
    assert [o.rid for o in outputs] == ["b"]
    bench.scheduler.check_integrity()


def test_flush_waits_for_quiet():
    bench = Bench(make_scheduler())
    bench.scheduler.add(make_request("a", 100))
    assert not bench.scheduler.flush_cache()
    bench.run()
    assert bench.scheduler.cache.num_idle == 1
    assert bench.scheduler.flush_cache()
    assert bench.scheduler.cache.num_idle == 0


def test_non_finite_logits_end_one_request_and_spoil_no_page():
    bench = Bench(make_scheduler(make_limits(step=64)))
    bench.runner.spoiled.add("bad")
    requests = [make_request("good", 150), make_request("bad", 190), make_request("after", 190)]
    bench.run(*requests)
    assert bench.finish["bad"].reason == "error"
    assert "not finite" in bench.finish["bad"].message
    assert bench.last["bad"].token_ids == ()
    assert bench.scheduler.counters.nonfinite == 1
    bench.assert_undisturbed(requests[0], requests[2])


def test_a_request_that_fails_takes_the_pages_it_read_out_of_the_cache():
    bench = Bench(make_scheduler())
    bench.run(make_request("first", 200))
    bench.runner.spoiled.add("bad")
    bench.run(make_request("bad", 200))
    assert bench.scheduler.cache.num_idle == 0
    bench.run(make_request("next", 200))
    assert bench.last["next"].cached_tokens == 0


def test_end_tokens():
    request = make_request("a", 10, new=300)
    (end, *_) = set(expected_output(request, 0)[30:]) - set(expected_output(request, 0)[:30])
    bench = Bench(make_scheduler())
    stopped = make_request("stop", 10, new=300, stop_token_ids=(end,))
    ended = make_request("eos", 10, new=300, ignore_eos=False)
    bench.run(stopped, ended, make_request("length", 10, new=4))
    assert bench.finish["stop"] == Finish("stop", matched_token=end)
    assert bench.tokens["stop"][-1] == end
    assert bench.finish["eos"] == Finish("stop", matched_token=EOS)
    assert bench.finish["length"] == Finish("length")
    assert len(bench.tokens["length"]) == 4


def test_end_tokens_are_banned_until_the_minimum_is_reached():
    bench = Bench(make_scheduler())
    bench.scheduler.add(make_request("a", 3, min_new_tokens=2, stop_token_ids=(5,)))
    banned = [w.sample.banned_ids for _ in range(4) for w in works_of(bench.step()) if w.sample]
    assert banned == [(5,), (5,), (), ()]


def test_the_sampler_is_told_what_it_needs_and_no_more():
    scheduler = make_scheduler()
    scheduler.add(
        make_request(
            "a", 3, min_new_tokens=1, stop_token_ids=(5,), ignore_eos=False, presence_penalty=1.0
        )
    )
    scheduler.add(make_request("b", 3, seed=None))
    first, second = (w.sample for w in scheduler.schedule().sequences)
    assert first is not None
    assert first.banned_ids == (5, EOS)
    assert first.history_ids == (1, 4, 7)
    assert first.num_prompt == 3
    assert second is not None
    assert (second.banned_ids, second.history_ids) == ((), ())
    assert second.seed == 1001


@pytest.mark.parametrize(
    ("request_", "param", "sentence"),
    [
        (
            make_request("r", 512),
            "prompt",
            "prompt is too long: 512 tokens > 511 maximum",
        ),
        (make_request("r", 500, new=13), "max_tokens", "513, but the context holds 512"),
        (make_request("r", [VOCAB]), "prompt", f"token id {VOCAB}; the model's ids go from 0 to"),
        (make_request("r", [1, -1]), "prompt", "token id -1; the model's ids go from 0 to"),
        (make_request("r", []), "prompt", "empty"),
        (make_request("r", new=0), "max_new_tokens", "at least 1; it is 0"),
        (make_request("r", temperature=-1.0), "temperature", "0 or more; it is -1"),
        (make_request("r", temperature=float("nan")), "temperature", "0 or more; it is nan"),
        (make_request("r", top_p=0.0), "top_p", "above 0 and at most 1"),
        (make_request("r", top_k=-1), "top_k", "at least 1, or 0 for all"),
        (make_request("r", min_p=1.5), "min_p", "from 0 to 1"),
        (make_request("r", repetition_penalty=0.0), "repetition_penalty", "from 0.01 to 100"),
        (make_request("r", presence_penalty=3.0), "presence_penalty", "from -2 to 2"),
        (make_request("r", frequency_penalty=-3.0), "frequency_penalty", "from -2 to 2"),
        (make_request("r", logit_bias={1: 101.0}), "logit_bias", "within 100 of 0"),
        (make_request("r", logit_bias={VOCAB: 1.0}), "logit_bias", f"token id {VOCAB}"),
        (make_request("r", stop_token_ids=(-1,)), "stop_token_ids", "token id -1"),
        (make_request("r", stop_token_ids=tuple(range(VOCAB))), "stop_token_ids", "fewer than"),
        (make_request("r", num_logprobs=101), "num_logprobs", "0 to 100; it is 101"),
    ],
)
def test_what_can_never_be_served_is_refused(request_: Request, param: str, sentence: str):
    engine = Engine(make_scheduler(), FakeRunner(64))
    with pytest.raises(RequestError, match=sentence) as caught:
        engine.add(request_)
    assert caught.value.param == param
    assert not engine.has_work


def test_what_the_whole_cache_cannot_hold_is_refused_with_both_numbers():
    engine = Engine(make_scheduler(make_limits(4)), FakeRunner(4))
    with pytest.raises(RequestError, match=r"250 tokens and .* 257, but the whole cache"):
        engine.add(make_request("a", 250, new=7))
    engine.add(make_request("b", 250, new=6))


def test_a_live_rid_is_refused():
    scheduler = make_scheduler()
    scheduler.add(make_request("a"))
    with pytest.raises(RequestError, match="'a' is already running"):
        scheduler.add(make_request("a"))


def test_whole_prompts_come_last_and_the_longest_at_the_end():
    """Attention looks for them at the end of a step; who shares pages or goes on is before them."""
    bench = Bench(make_scheduler(make_limits(64, running=8, step=4096, context=1024)))
    shared = [7] * 200
    bench.scheduler.add(make_request("goes on", shared, 9))
    bench.step()
    for rid, prompt in (("long", [5] * 90), ("short", [3] * 20), ("shares", [*shared, 1])):
        bench.scheduler.add(make_request(rid, prompt))
    bench.scheduler.add(make_request("middle", [4] * 50))
    works = works_of(bench.step())
    assert [work.rid for work in works] == ["goes on", "shares", "short", "middle", "long"]
    assert [work.start == 0 for work in works] == [False, False, True, True, True]
