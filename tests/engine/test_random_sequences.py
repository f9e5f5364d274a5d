"""Random add / step / abort / failure / flush sequences under memory pressure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.engine.fakes import (
    VOCAB,
    FakeFoundry,
    FakeMaker,
    FakeRunner,
    NoForecast,
    expected_output,
    make_limits,
    make_request,
    make_scheduler,
)
from tetrad.core.errors import RequestError
from tetrad.core.plan import StepPlan
from tetrad.core.request import Grammar, Request, RequestOutput
from tetrad.engine.engine import Engine
from tetrad.engine.grammars import Grammars
from tetrad.engine.ledger import MAX_RETRIES

MAX_FAMILY = 2


class Healer:
    """Computes a step again, as the guard does. If it `heals`, all goes well then."""

    def __init__(self, runner: FakeRunner, *, heals: bool) -> None:
        self.runner = runner
        self.heals = heals
        self.num_cures: Counter[str] = Counter()

    def cure(self, plan: StepPlan, rids: Collection[str]) -> bool:
        spoiled, healed = self.runner.spoiled, set(rids if self.heals else ())
        self.runner.spoiled = spoiled & set(rids) - healed  # others were finite in this step
        self.runner.compute(plan)
        self.runner.spoiled = spoiled - healed
        self.num_cures.update(healed)
        return self.heals


class EngineMachine(RuleBasedStateMachine):
    """Requests of few prompt families, so that prefixes are shared, on a small pool."""

    @initialize(
        num_pages=st.integers(3, 9),
        running=st.integers(1, 5),
        step=st.integers(1, 200),
        use_prefix_cache=st.booleans(),
        overlap=st.booleans(),
        continuous_steps=st.sampled_from([1, 1, 5]),
        has_forecast=st.booleans(),
        preemption_threshold=st.sampled_from([None, None, 0, 1]),
        grammar_delay=st.integers(0, 3),
        stream_interval=st.sampled_from([1, 1, 3]),
        heals=st.sampled_from([None, False, True, True]),
    )
    def start(
        self,
        num_pages: int,
        running: int,
        step: int,
        use_prefix_cache: bool,
        overlap: bool,
        continuous_steps: int,
        has_forecast: bool,
        preemption_threshold: int | None,
        grammar_delay: int,
        stream_interval: int,
        heals: bool | None,
    ) -> None:
        limits = make_limits(num_pages, running=running, step=step, context=450)
        self.runner = FakeRunner(num_pages)
        scheduler = make_scheduler(
            limits, use_prefix_cache=use_prefix_cache, preemption_threshold=preemption_threshold
        )
        if not has_forecast:
            scheduler.forecast = NoForecast()
        self.healer = None if heals is None else Healer(self.runner, heals=heals)
        self.engine = Engine(
            scheduler,
            self.runner,
            overlap=overlap,
            continuous_steps=continuous_steps,
            stream_interval=stream_interval,
            guard=self.healer,
        )
        self.maker = FakeMaker(running)
        self.engine.grammars = Grammars(FakeFoundry(grammar_delay), self.maker)
        self.overlap = overlap
        self.were_spoiled: set[str] = set()
        self.given_up: set[str] = set()
        self.live: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.num_added = 0

    @rule(
        family=st.integers(0, MAX_FAMILY),
        length=st.integers(1, 300),
        tail=st.lists(st.integers(0, VOCAB - 1), max_size=3),
        new=st.integers(1, 150),
        ignore_eos=st.booleans(),
        priority=st.sampled_from([0, 0, 1, 2, -1]),
        key_name=st.sampled_from("ab"),
        grammar=st.sampled_from(
            [None, None, Grammar("regex", "a"), Grammar("regex", "b", close_id=5)]
        ),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.2]),
    )
    def add(
        self,
        family: int,
        length: int,
        tail: list[int],
        new: int,
        ignore_eos: bool,
        priority: int,
        key_name: str,
        grammar: Grammar | None,
        repetition_penalty: float,
    ) -> None:
        rid = f"r{self.num_added}"
        self.num_added += 1
        prompt = [(i * i + family) % VOCAB for i in range(length)] + tail
        request = make_request(
            rid,
            prompt,
            new,
            priority=priority,
            key_name=key_name,
            ignore_eos=ignore_eos,
            seed=self.num_added % 2,
            grammar=grammar,
            repetition_penalty=repetition_penalty,
        )
        limits = self.engine.scheduler.limits
        fits = len(prompt) + new <= min(limits.cache_tokens, limits.context_tokens)
        try:
            self.engine.add(request)
        except RequestError:
            assert not fits
        else:
            assert fits
            self.live[rid] = request

    @rule(count=st.integers(1, 60))
    def step(self, count: int) -> None:
        for _ in range(count):
            assert not self.engine.admit_ready()
            for output in self.engine.step():
                self._take(output)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.live)))
        self.engine.abort(rid)
        del self.live[rid]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), is_for_all=st.booleans())
    def end(self, data: st.DataObject, is_for_all: bool) -> None:
        """An operator's abort: each of them is told, once."""
        rid = None if is_for_all else data.draw(st.sampled_from(sorted(self.live)))
        meant = {rid} if rid else set(self.live)
        ended = self.engine.end(rid)
        assert {output.rid for output in ended} == meant
        assert all(output.finish and output.finish.reason == "abort" for output in ended)
        for name in meant:
            del self.live[name]

    @rule(set_back=st.booleans())
    def pause(self, set_back: bool) -> None:
        """What is in flight is handed out; nothing runs until it goes on."""
        for output in self.engine.pause():
            self._take(output)
        if set_back:
            self.engine.set_back()
            assert self.engine.stats().used_pages == 0
        assert not self.engine.can_step
        self.engine.check_integrity()
        self.engine.resume()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def spoil(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.live)))
        self.runner.spoiled.add(rid)
        self.were_spoiled.add(rid)

    @rule()
    def pass_by(self) -> None:
        """What spoiled logits does so no more, perhaps before anybody has looked at them."""
        self.runner.spoiled.clear()

    @precondition(lambda self: self.maker.token_ids)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """A grammar takes too long from now on."""
        self.maker.slow.add(data.draw(st.sampled_from(sorted(self.maker.token_ids))))
        self.given_up |= {rid for rid, request in self.live.items() if request.sampling.grammar}

    @rule()
    def flush(self) -> None:
        assert self.engine.flush_cache() == (not self.engine.has_work)

    @invariant()
    def integrity(self) -> None:
        self.engine.check_integrity()
        waits = self.engine.awaits_grammars
        assert bool(self.live) == (self.engine.has_work or waits)

    def teardown(self) -> None:
        while self.engine.has_work or self.engine.awaits_grammars:
            self.step(1)
        assert not self.live
        self.engine.check_integrity()
        assert self.engine.flush_cache()
        assert self.engine.stats().used_pages == 0
        assert self.engine.scheduler.cache.pool.num_free == self.engine.stats().total_pages

    def _take(self, output: RequestOutput) -> None:
        self.tokens.setdefault(output.rid, []).extend(output.token_ids)
        if output.finish:
            self._finished(output.rid, output.finish.reason)

    def _finished(self, rid: str, reason: str) -> None:
        request = self.live.pop(rid)
        if reason == "error" and rid not in self.given_up:
            assert rid in self.were_spoiled
            if self.healer and self.healer.heals:
                assert self.healer.num_cures[rid] == MAX_RETRIES
        # Who is spoiled when all its steps are launched may still end well.
        assert reason == "error" or self.overlap or rid not in self.runner.spoiled
        expected = expected_output(request, request.sampling.seed or 0)
        got = self.tokens[rid]
        assert got == (expected[: len(got)] if reason == "error" else expected)


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
