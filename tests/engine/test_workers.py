"""Several API processes on one engine: each hears of its own requests, all hear of its life."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from tests.engine.fake_worker import KILLED, RAISES, STUCK, FakeEngineClient
from tests.engine.fakes import expected_output, make_request
from tetrad.core.config import ServeConfig
from tetrad.core.errors import EngineDiedError, RequestError
from tetrad.core.messages import AddRequests, Message, StepOutputs
from tetrad.core.request import Request, RequestOutput
from tetrad.engine.link import EngineLink
from tetrad.engine.loop import BEAT_INTERVAL_S

SOON_S = 30.0
"""Upper bound on what takes milliseconds, so that a hang fails."""


@dataclass
class Shared:
    """An engine, its first API process's end, and two further ones."""

    first: FakeEngineClient
    second: EngineLink
    third: EngineLink

    @property
    def all(self) -> tuple[EngineLink, ...]:
        return self.first, self.second, self.third


@pytest.fixture
async def shared() -> AsyncIterator[Shared]:
    first = await FakeEngineClient.start(ServeConfig())
    assert isinstance(first, FakeEngineClient)
    links = [await EngineLink.join(first.add_worker(number), number) for number in (1, 2)]
    yield Shared(first, *links)
    for link in links:
        await link.stop()
    await first.stop()


MANY = 40
"""More long requests than the engine can finish before it is told something else."""


async def collect(link: EngineLink, request: Request) -> list[RequestOutput]:
    async with asyncio.timeout(SOON_S):
        return [output async for output in link.generate(request)]


async def until(condition) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():
            await asyncio.sleep(0.01)


async def test_all_know_the_engine(shared: Shared):
    assert {link.info["pid"] for link in shared.all} == {shared.first.info["pid"]}


async def test_each_gets_its_own_requests_and_one_message_a_step(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
):
    heard: dict[EngineLink, list[Message]] = {link: [] for link in shared.all}
    for link in shared.all:

        def receive(message, link=link, receive=link._receive):
            heard[link].append(message)
            receive(message)

        monkeypatch.setattr(link, "_receive", receive)
    requests = [make_request(f"r{i}", 20 + 9 * i, 20, seed=i) for i in range(12)]
    results = await asyncio.gather(
        *(collect(shared.all[i % 3], request) for i, request in enumerate(requests))
    )
    await until(lambda: all(link.stats.running_requests == 0 for link in shared.all))
    for i, (request, outputs) in enumerate(zip(requests, results, strict=True)):
        assert [t for o in outputs for t in o.token_ids] == expected_output(request, i)
    steps = {link: [m for m in heard[link] if isinstance(m, StepOutputs)] for link in shared.all}
    assert len({len(heard_by) for heard_by in steps.values()}) == 1, "not one message a step"
    for number, link in enumerate(shared.all):
        rids = {output.rid for step in steps[link] for output in step.outputs}
        assert {rid.partition(".")[0] for rid in rids} == {str(number)}
        assert len(rids) == 4


async def test_a_rid_that_runs_is_refused_whoever_asks(shared: Shared):
    """And is free again when it has ended."""
    await shared.first.ask("pause", mode="in_place")
    request = make_request("a", 5, 30, seed=1)
    running = asyncio.create_task(collect(shared.second, request))
    while not (await shared.first.state())["waiting_requests"]:
        await asyncio.sleep(0.01)
    for link in shared.all:
        with pytest.raises(RequestError, match="'a' is already running"):
            await collect(link, request)
    await shared.first.ask("resume")
    for outputs in (await running, await collect(shared.third, request)):
        assert [t for o in outputs for t in o.token_ids] == expected_output(request, 1)
        assert {o.rid for o in outputs} == {"a"}


async def test_who_asks_is_answered(shared: Shared):
    with pytest.raises(RequestError, match="512 tokens > 511 maximum"):
        await collect(shared.third, make_request("a", 512))
    assert (await shared.second.state())["integrity"] == "ok"
    stream = shared.third.generate(make_request("b", 5, 500))
    await anext(stream)
    assert (await shared.second.flush_cache())[0] is False
    await stream.aclose()
    assert (await shared.third.flush_cache())[0] is True


async def test_leaving_early_aborts_in_the_engine(shared: Shared):
    stream = shared.second.generate(make_request("left", 5, 500))
    await anext(stream)
    await stream.aclose()
    state = await shared.second.state()
    assert (state["running_requests"], state["used_pages"]) == (0, 0)
    assert state["integrity"] == "ok"


async def test_all_know_the_last_figures_at_once(shared: Shared):
    """Not with the next beat only."""
    await collect(shared.second, make_request("a", 5, 20))
    begun_at = time.monotonic()
    await until(lambda: all(link.stats.generated_tokens_total == 20 for link in shared.all))
    assert time.monotonic() - begun_at < BEAT_INTERVAL_S / 4


async def test_requests_of_a_worker_that_is_gone_are_freed_and_others_go_on(shared: Shared):
    request = make_request("stays", 30, 400, seed=7)
    stays = asyncio.create_task(collect(shared.third, request))
    lost = [
        asyncio.create_task(collect(shared.second, make_request(f"r{i}", 70, 400)))
        for i in range(MANY)
    ]
    await until(lambda: shared.second.stats.waiting_requests)
    shared.first.remove_worker(1)
    # It had sent this before it died.
    shared.first._send(AddRequests([replace(make_request("1.99.late", 5, 500), worker=1)]))
    outputs = await stays
    assert [t for o in outputs for t in o.token_ids] == expected_output(request, 7)
    state = await shared.first.state()
    assert (state["running_requests"], state["waiting_requests"], state["used_pages"]) == (0, 0, 0)
    assert state["integrity"] == "ok"
    assert not all(task.done() for task in lost)
    for task in lost:
        task.cancel()
    await asyncio.gather(*lost, return_exceptions=True)


async def test_one_that_joins_later_has_nothing_of_one_before(shared: Shared):
    left = [
        asyncio.create_task(collect(shared.second, make_request(f"r{i}", 5, 400)))
        for i in range(MANY)
    ]
    await until(lambda: shared.second.stats.running_requests)
    shared.first.remove_worker(1)
    again = await EngineLink.join(shared.first.add_worker(3), 3)
    request = make_request("r0", 9, 50, seed=4)
    outputs = await collect(again, request)
    assert [t for o in outputs for t in o.token_ids] == expected_output(request, 4)
    await again.stop()
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


async def test_the_heart_beats_for_all(shared: Shared):
    task = asyncio.create_task(collect(shared.second, make_request("a", [STUCK])))
    await until(lambda: all(link.step_age_s > 0.4 for link in shared.all))
    assert all(link.last_beat_age_s < 5.0 for link in shared.all)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    shared.first._process.kill()  # type: ignore[union-attr]
    await until(shared.first.died.done)


async def test_last_words_reach_all(shared: Shared):
    bystander = asyncio.create_task(collect(shared.third, make_request("bystander", 5, 500)))
    culprit = asyncio.create_task(collect(shared.second, make_request("culprit", [RAISES])))
    for task in (culprit, bystander):
        with pytest.raises(EngineDiedError, match="the fake kernel broke"):
            await task
    await until(lambda: all(link.died.done() for link in shared.all))


async def test_a_death_without_last_words_is_the_first_one_s_to_tell(shared: Shared):
    culprit = asyncio.create_task(collect(shared.second, make_request("culprit", [KILLED])))
    reason = await asyncio.wait_for(shared.first.died, SOON_S)
    assert "was killed" in str(reason)
    assert not shared.second.died.done()
    shared.second.fail(reason)
    with pytest.raises(EngineDiedError, match="was killed"):
        await culprit
