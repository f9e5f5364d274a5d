"""Every sequence that is given up before its end is counted as aborted, once, however it came."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.server.apis.test_about import connect, samples
from tests.server.conftest import MakeService, until
from tests.server.fake_engine import FakeEngine, Step, saying
from tetrad.core.errors import EngineDiedError, RequestError
from tetrad.core.request import Finish, Request
from tetrad.server.stream import choices

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TALK = [{"role": "user", "content": "3"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": TALK, "max_tokens": 100, "ignore_eos": True},
    COMPLETIONS: {"prompt": "3", "max_tokens": 100, "ignore_eos": True},
    RESPONSES: {"input": "3", "max_output_tokens": 100},
    GENERATE: {"text": "3", "sampling_params": {"max_new_tokens": 100, "ignore_eos": True}},
    MESSAGES: {"messages": TALK, "max_tokens": 100},
}
NAMES = (
    "sglang:num_aborted_requests_total{model_name=abacus}",
    "tetrad_finished_total{reason=abort}",
    "vllm:request_success_total{engine=0,finished_reason=abort,model_name=abacus}",
)


def body_of(path: str, n: int) -> dict[str, Any]:
    """Of a request for `n` answers, where the API has several."""
    body = BODIES[path]
    if path == GENERATE:
        return body | {"sampling_params": body["sampling_params"] | {"n": n}}
    return body | {"n": n} if path in (CHAT, COMPLETIONS) else body


async def ended(client: httpx.AsyncClient) -> dict[str, float]:
    """How many did, by the reasons that were any's; and in all, as SGLang counts them."""
    found = await samples(client)
    reasons = ("stop", "length", "abort", "error")
    ours = {reason: found[f"tetrad_finished_total{{reason={reason}}}"] for reason in reasons}
    name = "vllm:request_success_total{{engine=0,finished_reason={},model_name=abacus}}".format
    assert ours == {reason: found[name(reason)] for reason in reasons}
    total = found["sglang:num_requests_total{model_name=abacus}"]
    return {reason: num for reason, num in ours.items() if num} | {"all": total}


async def aborted(client: httpx.AsyncClient) -> float:
    """How many were, by all names alike."""
    found = await samples(client)
    (count,) = {found[name] for name in NAMES}
    return count


async def leave(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    """Go when something of the answer is there, or as soon as the engine has the request."""
    async with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        async for _ in response.aiter_bytes():
            return


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_who_leaves_is_counted_once(
    address: str, engine: FakeEngine, path: str, stream: bool, has_begun: bool
):
    engine.script, engine.step_s = saying([18] * 99), 0.01
    n = 1 if path in (RESPONSES, MESSAGES) else 3
    if not has_begun:
        engine.gate.clear()
    async with httpx.AsyncClient(base_url=address) as client:
        asking = asyncio.create_task(leave(client, path, body_of(path, n) | {"stream": stream}))
        await until(lambda: len(engine.live) == n)
        if stream and has_begun:
            await asking
        else:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: not engine.live)
        found = await samples(client)
        assert [found[name] for name in NAMES] == [n, n, n]
        assert found[f"tetrad_requests_total{{outcome=cancelled,route={path}}}"] == 1
        assert found["sglang:num_requests_total{model_name=abacus}"] == n


async def test_choices_that_had_ended_are_not_aborted(address: str, engine: FakeEngine):
    """One of three has its answer, one was ended by the operator, the client leaves the last."""

    def script(request: Request) -> list[Step]:
        ends = {"0": Finish("stop"), "1": Finish("abort")}
        end = ends.get(request.rid[-1])
        return [Step((18,)), Step((), end)] if end else [Step((18,))] * 1000

    engine.script, engine.step_s = script, 0.01
    async with httpx.AsyncClient(base_url=address) as client:
        body = BODIES[CHAT] | {"n": 3, "stream": True}
        async with client.stream("POST", CHAT, json=body) as response:
            ends = 0
            async for line in response.aiter_lines():
                ends += '"finish_reason":"' in line
                if ends == 2:
                    break
        await until(lambda: not engine.live)
        assert await aborted(client) == 2
        assert (await samples(client))["tetrad_finished_total{reason=stop}"] == 1


async def test_a_stop_string_is_a_stop_though_the_engine_s_request_is_aborted(
    client: httpx.AsyncClient, engine: FakeEngine
):
    engine.script = saying([18] * 9)
    body = {"text": "3", "sampling_params": {"stop": "3"}}
    assert (await client.post(GENERATE, json=body)).status_code == 200
    assert len(engine.aborted) == 1
    assert await aborted(client) == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_whose_time_is_up_is_counted(
    make_service: MakeService, engine: FakeEngine, stream: bool
):
    engine.gate.clear()
    async with connect(make_service(request_timeout=0.1)) as client:
        response = await client.post(CHAT, json=body_of(CHAT, 2) | {"stream": stream})
        assert response.status_code == 504
        assert await aborted(client) == 2


async def test_who_ends_with_a_choice_that_fails_is_counted(
    client: httpx.AsyncClient, engine: FakeEngine
):
    """The one that failed was not aborted."""

    def script(request: Request) -> list[Step]:
        fails = request.rid.endswith("-0")
        return [Step((), Finish("error", message="No luck."))] if fails else [Step((18,))] * 1000

    engine.script, engine.step_s = script, 0.01
    assert (await client.post(CHAT, json=body_of(CHAT, 3))).status_code == 500
    assert await aborted(client) == 2
    assert await ended(client) == {"abort": 2, "error": 1, "all": 3}


async def test_a_dead_engine_and_a_refusal_abort_nobody(
    client: httpx.AsyncClient, engine: FakeEngine
):
    too_long = {"text": "3", "sampling_params": {"max_new_tokens": 10_000}}
    assert (await client.post(GENERATE, json=too_long)).status_code == 400
    assert await ended(client) == {"all": 0}
    engine.gate.clear()
    asking = asyncio.create_task(client.post(CHAT, json=body_of(CHAT, 3)))
    await until(lambda: len(engine.live) == 3)
    engine.died.set_result(EngineDiedError("No luck."))
    engine.gate.set()
    assert (await asking).status_code == 503
    assert await ended(client) == {"error": 3, "all": 3}


async def test_a_dead_engine_aborts_no_choice_that_waits_for_the_first_of_its_prompt(
    client: httpx.AsyncClient, engine: FakeEngine
):
    engine.gate.clear()
    long = {"prompt": "3 " * 100, "n": 3}
    asking = asyncio.create_task(client.post(COMPLETIONS, json=long))
    await until(lambda: len(engine.live) == 1)
    engine.died.set_result(EngineDiedError("No luck."))
    engine.gate.set()
    assert (await asking).status_code == 503
    assert await ended(client) == {"error": 3, "all": 3}


async def test_what_comes_after_a_client_has_left_is_not_counted(
    address: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    """The engine hears of it in a turn of its own, which may come late."""
    turns: list[Callable[[], object]] = []
    monkeypatch.setattr(choices, "in_turn_later", turns.append)
    engine.script = saying([18] * 3)
    engine.gate.clear()
    async with httpx.AsyncClient(base_url=address) as client:
        asking = asyncio.create_task(client.post(CHAT, json=body_of(CHAT, 2)))
        await until(lambda: len(engine.live) == 2)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: bool(turns))
        engine.gate.set()
        await until(lambda: not engine.live)
        assert await ended(client) == {"abort": 2, "all": 2}
        found = await samples(client)
        assert found["tetrad_unanswered_requests"] == 0
        assert found["tetrad_unanswered_prompt_tokens"] == 0
        for turn in turns:
            turn()


LONG = "3 " * 100


async def test_an_aborted_choice_ends_those_that_wait_for_its_prompt_and_no_others(
    client: httpx.AsyncClient, engine: FakeEngine
):
    def script(request: Request) -> list[Step]:
        is_ended = request.rid == "a-0"
        return [Step((), Finish("abort"))] if is_ended else list(saying([18] * 3)(request))

    engine.script = script
    body = {"text": [LONG, LONG], "rid": ["a", "b"], "sampling_params": {"n": 2}}
    answers = (await client.post(GENERATE, json=body)).json()
    assert [each["meta_info"]["id"] for each in answers] == ["a-0", "a-1", "b-0", "b-1"]
    reasons = [each["meta_info"]["finish_reason"]["type"] for each in answers]
    assert reasons == ["abort", "abort", "stop", "stop"]
    assert [request.rid for request in engine.seen] == ["a-0", "b-0", "b-1"]


async def test_a_choice_that_is_refused_after_others_have_begun_is_counted_once(
    client: httpx.AsyncClient, engine: FakeEngine
):
    def script(request: Request) -> list[Step]:
        if request.rid.endswith("-1"):
            raise RequestError("Request id 'job-1' is already running.")
        return [Step((18,))] * 1000

    engine.script, engine.step_s = script, 0.01
    body = {"text": LONG, "rid": "job", "sampling_params": {"n": 2}}
    assert (await client.post(GENERATE, json=body)).status_code == 400
    found = await samples(client)
    name = "tetrad_requests_total{{outcome={},route=/generate}}".format
    assert [found.get(name(outcome), 0) for outcome in ("failed", "refused")] == [1, 0]
