"""Ids, time limits, priorities, origins, root paths, limits of the queue, the operator's routes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from tests.server.apis.test_about import connect, samples
from tests.server.conftest import MakeService, until
from tests.server.door.test_access import FILE, bearer
from tests.server.fake_engine import FakeEngine, Step
from tetrad.core.config import ServeConfig
from tetrad.core.errors import ConfigError
from tetrad.core.messages import LogSettings, Reply
from tetrad.core.request import Finish
from tetrad.server.app import ROUTES, build_app
from tetrad.server.stream import push

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
BODY = {"messages": [{"role": "user", "content": "3"}]}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: BODY,
    COMPLETIONS: {"prompt": "3"},
    GENERATE: {"text": "3"},
}


@pytest.mark.parametrize(
    ("given", "is_taken"),
    [("abc-1", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("é", False)],
)
async def test_a_request_id_is_taken_and_sent_back_or_made(
    client: httpx.AsyncClient, engine: FakeEngine, given: str, is_taken: bool
):
    headers = [(b"X-Request-Id", given.encode("latin-1"))]
    for path in (CHAT, "/nowhere"):
        response = await client.post(path, json=BODY, headers=headers)
        assert (response.headers["x-request-id"] == given) == is_taken
    assert engine.seen[0].request_id == (given if is_taken else engine.seen[0].request_id)
    assert len(engine.seen[0].request_id) >= 3


async def test_an_answer_to_a_bug_has_its_id_too(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tetrad.server.model.ServedModel.check_name", lambda *_: 1 / 0)
    response = await client.post(CHAT, json=BODY, headers={"X-Request-Id": "bug-1"})
    assert (response.status_code, response.headers["x-request-id"]) == (500, "bug-1")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE])
@pytest.mark.parametrize("how", ["field", "header", "flag", "header above the flag"])
async def test_a_request_s_time_is_bounded(
    make_service: MakeService, engine: FakeEngine, path: str, how: str
):
    engine.gate.clear()
    is_flag = "flag" in how
    service = make_service(request_timeout=0.1 if is_flag else None)
    headers = {"header": {"X-Request-Timeout": "0.1"}, "flag": {}}.get(
        how, {"X-Request-Timeout": "60"}
    )
    body = BODIES[path] | ({"timeout": 0.1} if how == "field" else {})
    async with connect(service) as client:
        response = await client.post(path, json=body, headers={} if how == "field" else headers)
        assert response.status_code == 504, response.text
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("timeout_error", "deadline_exceeded")
        assert "within its 0.1 s" in error["message"]
        assert response.headers["x-should-retry"] == "false"
        assert not engine.live
        assert len(engine.aborted) == 1
        assert (await samples(client))["tetrad_request_timeouts_total"] == 1
        assert service.open_requests == 0


async def test_a_stream_that_takes_too_long_ends_with_the_error(
    client: httpx.AsyncClient, engine: FakeEngine
):
    engine.step_s = 0.02
    body = {"text": "3" * 100, "stream": True, "timeout": 0.3}
    response = await client.post(GENERATE, json=body)
    assert response.status_code == 200
    *events, last = [line for line in response.text.split("\n\n") if line]
    assert len(events) > 1
    assert "deadline_exceeded" in last
    assert (await samples(client))["tetrad_request_timeouts_total"] == 1
    assert engine.aborted


@pytest.mark.parametrize("value", ["x", "0", "-1", "nan", "inf", "1e9"])
async def test_a_wrong_timeout_is_refused(client: httpx.AsyncClient, value: str):
    response = await client.post(CHAT, json=BODY, headers={"X-Request-Timeout": value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "X-Request-Timeout"
    response = await client.post(CHAT, json=BODY | {"timeout": 0})
    assert response.status_code == 400


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE])
@pytest.mark.parametrize(
    ("flags", "priority"),
    [
        ({}, 0),
        ({"enable_priority_scheduling": True}, 7),
        ({"enable_priority_scheduling": True, "schedule_low_priority_values_first": True}, -7),
    ],
)
async def test_a_priority_reaches_the_engine(
    make_service: MakeService, engine: FakeEngine, path: str, flags: dict[str, bool], priority: int
):
    async with connect(make_service(**flags)) as client:
        assert (await client.post(path, json=BODIES[path] | {"priority": 7})).status_code == 200
    assert engine.seen[0].priority == priority


async def test_a_priority_that_would_change_nothing_may_be_refused(make_service: MakeService):
    async with connect(make_service(abort_on_priority_when_disabled=True)) as client:
        response = await client.post(CHAT, json=BODY | {"priority": 1})
        assert response.status_code == 400
        assert "--enable-priority-scheduling" in response.json()["error"]["message"]
        assert (await client.post(CHAT, json=BODY)).status_code == 200


async def test_a_page_of_another_origin(make_service: MakeService):
    origin = {"Origin": "https://app.example"}
    ask = origin | {"Access-Control-Request-Method": "POST"}
    async with connect(make_service(api_key="k")) as client:
        response = await client.options(CHAT, headers=ask)
        assert "access-control-allow-origin" not in response.headers
    service = make_service(api_key="k", allowed_origins=("https://app.example",))
    async with connect(service) as client:
        response = await client.options(CHAT, headers=ask)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://app.example"
        response = await client.post(CHAT, json=BODY, headers=origin | bearer("k"))
        assert response.headers["access-control-allow-origin"] == "https://app.example"
        assert "X-Request-Id" in response.headers["access-control-expose-headers"]
        response = await client.options(CHAT, headers=ask | {"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in response.headers


def test_origins_are_taken_as_vllm_writes_them():
    config = ServeConfig(allowed_origins=('["https://a.example", "*"]',))
    assert config.allowed_origins == ("https://a.example", "*")
    for wrong in ("a.example", "https://a.example/", "[x"):
        with pytest.raises(ConfigError, match=r"^--allowed-origins"):
            ServeConfig.parse({"allowed_origins": (wrong,)})


@pytest.mark.parametrize("path", ["/llm/v1/models", "/v1/models"])
async def test_a_root_path_is_served_whether_the_proxy_takes_it_off_or_not(
    make_service: MakeService, path: str
):
    async with connect(make_service(root_path="/llm", api_key="k")) as client:
        document = (await client.get("/openapi.json", headers=bearer("k"))).json()
        assert document["servers"] == [{"url": "/llm"}]
        assert (await client.get(path)).status_code == 401
        assert (await client.get(path, headers=bearer("k"))).status_code == 200
        assert (await client.get("/llm/health")).status_code == 200
        assert (await client.get("/llmv1/models", headers=bearer("k"))).status_code == 404


PATHS = ("/", "/nowhere", "/v1/models/other", "/openapi.json")
EVIL = {"Host": "evil.example"}


@pytest.mark.parametrize("key", ["none", "user", "admin"])
@pytest.mark.parametrize("root", ["", "/llm"])
async def test_a_slash_behind_a_path_changes_nothing(
    make_service: MakeService, root: str, key: str
):
    service = make_service(root_path=root, api_key="user", admin_api_key="admin")
    headers = bearer(key) | EVIL
    async with connect(service) as client:
        for path in (*PATHS, *(route.path for route in ROUTES if "{" not in route.path)):
            for method in ("GET", "POST"):
                plain = await client.request(method, root + path, headers=headers)
                slashed = await client.request(method, f"{root}{path}/", headers=headers)
                twice = await client.request(method, f"{root}{path}//", headers=headers)
                assert slashed.status_code == plain.status_code, path
                for answer in (plain, slashed, twice):
                    assert not answer.is_redirect
                    assert "evil" not in f"{answer.headers} {answer.text}"


@pytest.mark.parametrize("wrong", ["llm", "/llm/", "/"])
def test_a_wrong_root_path_is_refused(wrong: str):
    with pytest.raises(ConfigError, match="--root-path must begin with /"):
        ServeConfig.parse({"root_path": wrong})


async def waiting(client: httpx.AsyncClient, num: int, key: str = "") -> list[asyncio.Task[Any]]:
    headers = bearer(key) if key else {}
    post = client.post
    return [asyncio.create_task(post(CHAT, json=BODY, headers=headers)) for _ in range(num)]


async def test_tokens_that_wait_have_a_limit(make_service: MakeService, engine: FakeEngine):
    engine.gate.clear()
    service = make_service(max_queued_tokens=30)
    async with connect(service) as client:
        tasks = await waiting(client, 1)
        await until(lambda: service.open_requests == 1)
        prompt = "3" * 100
        response = await client.post(COMPLETIONS, json={"prompt": prompt})
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert "--max-queued-tokens is 30" in response.json()["error"]["message"]
        engine.gate.set()
        await asyncio.gather(*tasks)
        response = await client.post(COMPLETIONS, json={"prompt": prompt})
        assert response.status_code == 200, "the only one may be as long as it is"


async def test_a_key_s_share_of_the_queue_is_its_own(
    make_service: MakeService, engine: FakeEngine, tmp_path: Path
):
    """One key fills the queue; it is told so, and the other's requests still come in."""
    (tmp_path / "keys").write_text(FILE)
    engine.info["max_running_requests"] = 1
    engine.gate.clear()
    service = make_service(max_queued_requests=4, api_key_file=tmp_path / "keys")
    async with connect(service) as client:
        tasks = await waiting(client, 5, "key-of-alice")
        await until(lambda: service.open_requests == 5)
        refused = await client.post(CHAT, json=BODY, headers=bearer("key-of-alice"))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        error = refused.json()["error"]
        assert error["type"] == "rate_limit_error"
        assert "6 of them would be of key alice, whose share is 2" in error["message"]
        tasks += await waiting(client, 2, "key-of-bob")
        await until(lambda: service.open_requests == 7)
        refused = await client.post(CHAT, json=BODY, headers=bearer("key-of-bob"))
        assert refused.status_code == 429
        assert "3 of them would be of key bob" in refused.json()["error"]["message"]
        engine.gate.set()
        assert {task.status_code for task in await asyncio.gather(*tasks)} == {200}
    assert [request.key_name for request in engine.seen] == ["alice"] * 5 + ["bob"] * 2
    assert service.tally.each(4) == [0.0]


@pytest.mark.parametrize(
    ("path", "body", "asked"),
    [
        ("/abort_request", {"rid": "gen-1"}, ("abort", {"rid": "gen-1"})),
        ("/abort_request", {"abort_all": True}, ("abort", {"rid": None})),
        ("/pause_generation", None, ("pause", {"mode": "abort"})),
        ("/pause_generation", {"mode": "retract"}, ("pause", {"mode": "retract"})),
        ("/continue_generation", None, ("resume", {})),
        (
            "/start_profile",
            {"num_steps": 5, "activities": ["CPU"]},
            ("start_profile", {"num_steps": 5}),
        ),
        ("/start_profile", None, ("start_profile", {"num_steps": None})),
        ("/stop_profile", {}, ("stop_profile", {})),
        (
            "/configure_logging",
            {"log_level": "debug"},
            ("set_logging", {"log_level": "debug", "access_log": None}),
        ),
    ],
)
async def test_an_order_of_the_operator_reaches_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: Any, asked: tuple[str, Any]
):
    response = await (client.post(path) if body is None else client.post(path, json=body))
    assert response.status_code == 200, response.text
    assert engine.asked == [asked]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/abort_request", {}, "give either rid or abort_all"),
        ("/abort_request", {"rid": "a", "abort_all": True}, "give either rid or abort_all"),
        ("/pause_generation", {"mode": "sleep"}, "'abort', 'in_place' or 'retract'"),
        ("/start_profile", {"output_dir": "/etc"}, "by --profile-dir; leave output_dir out"),
        ("/configure_logging", {}, "give log_level, access_log or both"),
        ("/configure_logging", {"log_level": "loud"}, "'debug'"),
    ],
)
async def test_a_wrong_order_is_refused(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: Any, message: str
):
    response = await client.post(path, json=body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert not engine.asked


async def test_what_the_engine_refuses_is_told(client: httpx.AsyncClient, engine: FakeEngine):
    engine.reply = Reply(0, ok=False, text="A profile is running already.")
    response = await client.post("/start_profile")
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "A profile is running already."


async def test_what_any_process_is_told_to_log_is_obeyed(make_service: MakeService):
    service = make_service()
    engine = service.engine
    assert engine.on_log_settings is not None
    engine.on_log_settings(LogSettings(None, "json"))
    assert service.reporter.access_log == "json"
    engine.on_log_settings(LogSettings(None, None))
    assert service.reporter.access_log == "json"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_aborted_answer_keeps_what_it_had(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
):
    engine.script = lambda _request: [Step((18,)), Step((), Finish("abort"))]
    response = await client.post(GENERATE, json={"text": "3", "stream": stream})
    text = response.text.split("\n\n")[-3].removeprefix("data: ") if stream else response.text
    assert '"finish_reason":{"type":"abort","message":"The server\'s operator' in text
    assert '"output_ids":[18]' in text
    response = await client.post(CHAT, json=BODY)
    assert response.json()["choices"][0]["finish_reason"] == "abort"
    found = await samples(client)
    assert found["tetrad_finished_total{reason=abort}"] == 2
    assert found["sglang:num_aborted_requests_total{model_name=abacus}"] == 2


async def test_a_request_that_is_over_is_no_cycle(make_service: MakeService):
    """Who writes past the application knows who answers, who knows the request's scope: the
    collector hardly ever comes by where thousands of streams live for long."""
    app = build_app(make_service())
    states = []

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"] = {push.BODY: None}
        states.append(scope["state"])
        await app(scope, receive, send)

    transport = httpx.ASGITransport(served)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.get("/nowhere")).status_code == 404
    assert states == [{}, {}]
