"""Models, configuration, health, cache, metrics and the key."""

from __future__ import annotations

import asyncio
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

import tetrad
from tests.server.conftest import MakeService, until
from tests.server.fake_engine import FakeEngine
from tetrad.core.config import ServeConfig
from tetrad.data import embedded_model
from tetrad.server.app import GENERATING, ROUTES, build_app
from tetrad.server.model import ServedModel
from tetrad.server.service import Service

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "3"}]}


def connect(service: Service) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(build_app(service), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://tetrad")


async def test_models(client: httpx.AsyncClient):
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("abacus", "model", 256)
    assert (await client.get("/v1/models/abacus")).json() == card
    assert (await client.get("/v1/models/other")).status_code == 404


async def test_a_model_whose_name_ends_in_a_slash(service: Service, client: httpx.AsyncClient):
    service.model = replace(service.model, name="lab/abacus/")
    for path in ("lab/abacus/", "lab/abacus"):
        assert (await client.get(f"/v1/models/{path}")).json()["id"] == "lab/abacus/"
    assert (await client.get("/v1/models/lab")).status_code == 404


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
async def test_model_info_names_a_folder_with_a_tokenizer(client: httpx.AsyncClient, path: str):
    info = (await client.get(path)).json()
    assert info["tokenizer_path"] == info["model_path"] == str(embedded_model())
    assert info["reasoning_parser"] == "glm45"
    assert info["tool_call_parser"] == "glm47"
    assert info["architectures"] == ["GlmMoeDsaForCausalLM"]


@pytest.mark.parametrize("path", ["/model_info", "/server_info"])
async def test_a_lent_tokenizer_is_named_where_it_is(engine: FakeEngine, path: str):
    """A client draws its prompts from there."""
    config = ServeConfig(model=Path("glm-5"), load_format="dummy")
    service = Service(config, ServedModel.load(config))
    service.attach(engine)
    async with connect(service) as client:
        info = (await client.get(path)).json()
    assert info["model_path"] == "glm-5"
    assert info["tokenizer_path"] == str(embedded_model())


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_server_info_is_flat_complete_and_keeps_the_key(
    make_service: MakeService, monkeypatch: pytest.MonkeyPatch, path: str
):
    command = ["tetrad", "serve", "--api-key", "s3cret", "--admin-api-key=s3cret"]
    monkeypatch.setattr(sys, "argv", command)
    service = make_service(api_key="s3cret", chunked_prefill_size=77)
    async with connect(service) as client:
        response = await client.get(path, headers={"Authorization": "Bearer s3cret"})
    assert "s3cret" not in response.text
    info = response.json()
    hidden = {"api_key", "admin_api_key", "ssl_keyfile_password"}
    assert set(ServeConfig.model_fields) - hidden <= set(info)
    assert not hidden & set(info)
    assert info["chunked_prefill_size"] == 77
    assert (info["context_length"], info["max_running_requests"]) == (256, 4)
    assert (info["mem_fraction_static"], info["moe_runner_backend"]) == (0.3, "torch")
    assert (info["device"], info["dtype"]) == ("cpu", "float32")
    assert (info["reasoning_parser"], info["tool_call_parser"]) == ("glm45", "glm47")
    assert info["state"] == {"integrity": "ok"}
    assert info["launch_command"] == "tetrad serve --api-key ... --admin-api-key=..."
    assert info["scheduler_info"] == {
        "status": "ready",
        "max_total_num_tokens": 4096,
        "max_req_input_len": 255,
    }
    (state,) = info["internal_states"]
    assert state["effective_max_running_requests_per_dp"] == 4
    assert state["avg_spec_accept_length"] == 1.0
    assert (state["num_retractions"], state["new_token_ratio"]) == (3, 0.25)
    assert state["decode_cuda_graph_bs"] == [1, 2, 4]
    assert state["decode_cuda_graph_memory_gb"] == 0.5
    assert info["engine"]["max_running_requests"] == 4


async def test_health_is_judged_by_the_heartbeat_and_asks_nothing(
    client: httpx.AsyncClient, engine: FakeEngine, service: Service
):
    engine.gate.clear()
    task = asyncio.create_task(client.post(CHAT, json=BODY))
    await until(lambda: bool(engine.live))
    assert (await client.get("/health")).status_code == 200
    engine.last_beat_age_s = 30.0
    response = await client.get("/health")
    assert response.status_code == 503
    assert "silent for 30 s" in response.text
    engine.last_beat_age_s, engine.step_age_s = 0.0, 1000.0
    assert "step has been running" in (await client.get("/health")).text
    engine.step_age_s = 0.0
    service.phase = "draining"
    assert (await client.get("/health")).status_code == 503
    engine.gate.set()
    await task


async def test_while_loading_everything_but_health_says_what_is_going_on(model: ServedModel):
    service = Service(ServeConfig(), model)
    service.detail = "loading weights 40%"
    async with connect(service) as client:
        for path in ("/v1/models", "/server_info", "/health_generate"):
            response = await client.get(path)
            assert response.status_code == 503
            assert "loading weights 40%" in response.text
        response = await client.post(CHAT, json=BODY)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "5"
        assert "starting: loading" in (await client.get("/health")).text
        assert (await client.get("/metrics")).status_code == 200


async def test_health_generate_runs_one_token(client: httpx.AsyncClient, engine: FakeEngine):
    assert (await client.get("/health_generate")).status_code == 200
    (probe,) = engine.seen
    assert probe.prompt_ids == (0,)
    assert probe.sampling.max_new_tokens == 1
    assert probe.rid.startswith("HEALTH_CHECK")
    engine.kill("gone")
    assert (await client.get("/health_generate")).status_code == 503


async def test_flush_cache(client: httpx.AsyncClient, engine: FakeEngine):
    asked = (("GET", "/flush_cache"), ("POST", "/flush_cache"), ("POST", "/reset_prefix_cache"))
    for method, path in asked:
        response = await client.request(method, path)
        assert response.status_code == 200
        assert response.text.startswith("Cache flushed.\n")
    engine.flush_reply = (False, "2 requests are running.")
    response = await client.post("/flush_cache")
    assert response.status_code == 400
    assert "2 requests are running." in response.text
    waiting = asyncio.create_task(client.post("/flush_cache?timeout=60"))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    engine.flush_reply = (True, "")
    assert (await waiting).status_code == 200
    for timeout in ("x", "-1", "nan", "1e9"):
        assert (await client.post(f"/flush_cache?timeout={timeout}")).status_code == 400


async def test_the_key_is_needed_everywhere_but_for_health(make_service: MakeService):
    async with connect(make_service(api_key="s3cret é")) as client:
        for route in ROUTES:
            path = route.path.replace("{name:path}", "x")
            response = await client.request(route.methods[0], path)
            is_open = path in ("/health", "/ready", "/ping")
            assert response.status_code == (200 if is_open else 401), path
        assert (await client.get("/nowhere")).status_code == 401
        for wrong in ("Bearer s3cret", "s3cret é", "Bearer s3cret éé", ""):
            headers = [(b"Authorization", wrong.encode())]
            assert (await client.get("/v1/models", headers=headers)).status_code == 401
        headers = [(b"Authorization", "Bearer s3cret é".encode())]
        assert (await client.get("/v1/models", headers=headers)).status_code == 200


async def samples(client: httpx.AsyncClient) -> dict[str, float]:
    text = (await client.get("/metrics")).text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


async def test_metrics_count_outcomes_and_read_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine
):
    engine.stats = structs.replace(
        engine.stats, used_pages=16, generated_tokens_total=42, running_requests=2
    )
    await client.post(CHAT, json=BODY)
    await client.post(CHAT, json={})
    await client.post(CHAT, json=BODY | {"max_tokens": 9999})
    engine.kill("gone")
    await client.post(CHAT, json=BODY)
    found = await samples(client)
    count = {
        outcome: found.get(f"tetrad_requests_total{{outcome={outcome},route={CHAT}}}")
        for outcome in ("success", "refused", "failed")
    }
    assert count == {"success": 1, "refused": 2, "failed": 1}
    assert found["tetrad_generated_tokens_total"] == 42
    assert found["tetrad_running_requests"] == 2
    assert found["tetrad_cache_usage_ratio"] == 0.25
    assert (found["tetrad_preemptions_total"], found["tetrad_new_token_ratio"]) == (3, 0.25)
    assert found["tetrad_open_requests"] == 0
    assert found["tetrad_unanswered_requests"] == 0
    for name in ("time_to_first_token", "time_per_output_token", "request_duration"):
        assert found[f"tetrad_{name}_seconds_count"] == 1


async def test_choices_that_wait_for_their_prompt_are_timed_from_their_own_beginning(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    """Of three choices the engine has one for 100 s; then the other two begin, and take no time.
    What others call a request's latency is a sequence's, too."""
    now = [5.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("tetrad.server.telemetry.metrics.time", clock)
    engine.gate.clear()
    body = {"prompt": [5] * 65, "n": 3, "max_tokens": 2}
    asking = asyncio.create_task(client.post("/v1/completions", json=body))
    await until(lambda: len(engine.seen) == 1)
    now[0] += 100.0
    engine.gate.set()
    assert (await asking).status_code == 200
    found = await samples(client)
    for name, labels in (
        ("tetrad_prefill_seconds", ""),
        ("tetrad_time_to_first_token_seconds", ""),
        ("tetrad_sequence_duration_seconds", ""),
        ("sglang:e2e_request_latency_seconds", "{model_name=abacus}"),
        ("vllm:e2e_request_latency_seconds", "{engine=0,model_name=abacus}"),
    ):
        assert found[f"{name}_count{labels}"] == 3
        assert found[f"{name}_sum{labels}"] == 100.0, name
    assert found["tetrad_request_duration_seconds_count"] == 1


async def test_only_requests_of_routes_that_generate_are_counted(client: httpx.AsyncClient):
    """Of others a refusal would be all that is known. Labels never hold what clients wrote."""
    refused = [
        await client.get("/v1/models/never-seen"),
        await client.get("/v1/responses/never-seen"),
        await client.post("/tokenize", json={}),
        await client.post("/v1/messages/count_tokens", json={}),
    ]
    assert {response.status_code for response in refused} <= {400, 404}
    text = (await client.get("/metrics")).text
    assert "never-seen" not in text
    assert "tetrad_requests_total{" not in text
    for path in GENERATING:
        assert (await client.post(path, json={})).status_code == 400
    found = await samples(client)
    counted = {name: value for name, value in found.items() if "tetrad_requests" in name}
    assert counted == {
        f"tetrad_requests_total{{outcome=refused,route={path}}}": 1 for path in GENERATING
    }
    paths = [route.path for route in ROUTES]
    assert [paths.count(path) for path in GENERATING] == [1] * 5


async def test_the_queue_has_a_limit(make_service: MakeService, engine: FakeEngine):
    engine.info["max_running_requests"] = 2
    engine.gate.clear()
    service = make_service(max_queued_requests=1)
    async with connect(service) as client:
        tasks = [asyncio.create_task(client.post(CHAT, json=BODY)) for _ in range(3)]
        await until(lambda: service.open_requests == 3)
        response = await client.post(CHAT, json=BODY | {"stream": True})
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        message = response.json()["error"]["message"]
        assert "2 requests would wait and --max-queued-requests is 1" in message
        engine.gate.set()
        assert {(await task).status_code for task in tasks} == {200}
        assert (service.open_requests, service.unanswered_requests) == (0, 0)
        assert (await client.post(CHAT, json=BODY)).status_code == 200


async def test_a_full_cache_counts_as_a_queue_although_slots_are_free(
    make_service: MakeService, engine: FakeEngine
):
    engine.gate.clear()
    service = make_service(max_queued_requests=1)
    async with connect(service) as client:
        task = asyncio.create_task(client.post(CHAT, json=BODY))
        await until(lambda: service.open_requests == 1)
        engine.stats = structs.replace(engine.stats, waiting_requests=1)
        assert (await client.post(CHAT, json=BODY)).status_code == 503
        engine.gate.set()
        await task


async def test_the_openapi_document_describes_the_bodies(client: httpx.AsyncClient):
    document: dict[str, Any] = (await client.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    references = set(re.findall(r"#/components/schemas/(\w+)", str(document)))
    assert {"ChatBody", "CompletionBody", "GenerateBody"} <= references <= set(schemas)
    assert "servers" not in document


async def test_health_and_version_under_the_names_of_other_servers(
    client: httpx.AsyncClient, service: Service
):
    assert (await client.get("/version")).json() == {"version": tetrad.__version__}
    for path in ("/ready", "/ping"):
        assert (await client.get(path)).status_code == 200
    service.phase = "draining"
    for path in ("/ready", "/ping"):
        assert (await client.get(path)).status_code == 503
    tokens = await client.post("/v1/tokenize", json={"prompt": "3"})
    service.phase = "ready"
    assert tokens.json() == (await client.post("/tokenize", json={"prompt": "3"})).json()
