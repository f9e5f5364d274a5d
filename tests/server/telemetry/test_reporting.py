"""What is told of requests: the access log, traces, and that no secret is in any of it."""

from __future__ import annotations

import asyncio
import gzip
import http.server
import io
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.house.source import ROOT
from tests.server.apis.test_about import connect
from tests.server.conftest import MakeService, until
from tests.server.door.test_access import bearer
from tests.server.fake_engine import FakeEngine
from tests.server.process.test_launch import serving
from tetrad.core.config import ServeConfig
from tetrad.core.messages import EngineProgress
from tetrad.server.process.console import Console, _held
from tetrad.server.telemetry.reporter import set_up_access_log

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "3"}]}
SECRETS = ("user-s3cret", "admin-s3cret", "file-s3cret", "tls-s3cret", "wrong-s3cret")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """What the access log says."""
    set_up_access_log()
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger = logging.getLogger("tetrad.access")
    listener = Listener()
    logger.addHandler(listener)
    yield said
    logger.removeHandler(listener)


async def test_a_line_of_json_for_each_request(
    make_service: MakeService, engine: FakeEngine, lines: list[str]
):
    async with connect(make_service(access_log="json")) as client:
        await client.post(f"{CHAT}?secret=1", json=BODY, headers={"X-Request-Id": "r-1"})
        await client.post(CHAT, json={})
        await client.get("/nowhere/s3cret")
        engine.gate.clear()
        await client.post(CHAT, json=BODY | {"timeout": 0.05})
    first, refused, unknown, late = map(json.loads, lines)
    assert first["request_id"] == "r-1"
    assert (first["method"], first["route"], first["status"]) == ("POST", CHAT, 200)
    assert (first["client"], first["key"], first["finish"]) == ("127.0.0.1", "", "stop")
    num_prompt = len(engine.seen[0].prompt_ids)
    assert (first["prompt_tokens"], first["cached_tokens"]) == (num_prompt, 3)
    assert first["completion_tokens"] == num_prompt + 1
    assert 0 <= first["first_token_ms"] <= first["duration_ms"]
    assert (refused["status"], unknown["status"]) == (400, 404)
    assert "finish" not in refused
    assert unknown["route"] == "other"
    assert (late["status"], late["finish"]) == (504, "timeout")
    assert "secret" not in "".join(lines)


async def test_who_is_refused_on_the_way_is_logged_with_its_route(
    make_service: MakeService, lines: list[str]
):
    service = make_service(
        access_log="json", api_key="k", root_path="/at", allowed_origins=("http://page",)
    )
    async with connect(service) as client:
        await client.post(f"/at{CHAT}", json=BODY)
        await client.get(CHAT, headers={"x-request-timeout": "soon"})
        asks = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
        await client.options(CHAT, headers=asks)
        await client.get("/nowhere")
    told = [(line["route"], line["status"]) for line in map(json.loads, lines)]
    assert told == [(CHAT, 401), (CHAT, 400), (CHAT, 200), ("other", 401)]


async def test_a_line_of_text_cannot_be_forged(make_service: MakeService, lines: list[str]):
    async with connect(make_service(access_log="text")) as client:
        await client.get("/health", headers={"X-Request-Id": 'a"status=500'})
        await client.get("/health")
    assert "status=200" in lines[0]
    assert r'request_id="a\"status=500" ' in lines[0]
    assert lines[0].count("\n") == 0


async def test_nothing_is_said_unless_asked_for(make_service: MakeService, lines: list[str]):
    async with connect(make_service()) as client:
        await client.post(CHAT, json=BODY)
    assert not lines


async def test_those_who_leave_are_in_the_log(
    make_service: MakeService, engine: FakeEngine, lines: list[str]
):
    service = make_service(access_log="json")
    engine.step_s = 0.02
    async with connect(service) as client:
        task = asyncio.create_task(client.post("/generate", json={"text": "3" * 100}))
        await until(lambda: bool(engine.live))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await until(lambda: bool(lines))
    left = json.loads(lines[0])
    assert left["finish"] == "cancelled"
    assert 0 < left["completion_tokens"] < 100


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes spans as an OpenTelemetry collector does."""

    spans: list[Any] = []  # noqa: RUF012 - one for all, since the server makes the handlers

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            raw = gzip.decompress(raw)
        request = ExportTraceServiceRequest.FromString(raw)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_arguments: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[str]:
    Collector.spans = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces"
        server.shutdown()
        thread.join()


async def test_a_request_is_a_trace_of_its_phases(
    make_service: MakeService, engine: FakeEngine, collector: str
):
    engine.step_s = 0.02
    service = make_service(otlp_traces_endpoint=collector)
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {"traceparent": f"00-{trace_id}-{parent_id}-01", "X-Request-Id": "r-1"}
    async with connect(service) as client:
        await client.post(CHAT, json=BODY, headers=headers)
        await client.post(CHAT, json={}, headers={"traceparent": "nonsense"})
    service.reporter.close()
    spans = {span.name: span for span in Collector.spans if span.trace_id.hex() == trace_id}
    assert set(spans) == {f"POST {CHAT}", "queue", "prefill", "decode"}
    whole = spans[f"POST {CHAT}"]
    assert whole.parent_span_id.hex() == parent_id
    attributes = {a.key: a.value for a in whole.attributes}
    assert attributes["tetrad.request_id"].string_value == "r-1"
    assert attributes["gen_ai.usage.input_tokens"].int_value == len(engine.seen[0].prompt_ids)
    assert attributes["gen_ai.usage.output_tokens"].int_value > 1
    for name in ("queue", "prefill", "decode"):
        assert spans[name].parent_span_id == whole.span_id
        assert whole.start_time_unix_nano <= spans[name].start_time_unix_nano
        assert spans[name].end_time_unix_nano <= whole.end_time_unix_nano
    assert spans["queue"].end_time_unix_nano == spans["prefill"].start_time_unix_nano
    assert spans["prefill"].end_time_unix_nano == spans["decode"].start_time_unix_nano
    (refused,) = [span for span in Collector.spans if span.trace_id.hex() != trace_id]
    assert not refused.parent_span_id


def test_without_opentelemetry_it_is_one_sentence():
    code = (
        "import sys; sys.modules['opentelemetry.sdk.trace'] = None\n"
        "from tests.server.serve_fake import start, run, ServeConfig\n"
        "config = {'port': 0, 'api_workers': 1, 'otlp_traces_endpoint': 'http://localhost:1'}\n"
        "sys.exit(run(ServeConfig.parse(config), start))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "error: --otlp-traces-endpoint needs OpenTelemetry, which is not installed; "
        '`pip install -e ".[otel]"` in Tetrad\'s folder brings it.\n'
    )


@pytest.mark.parametrize("kind", ["text", "json"])
def test_no_secret_is_ever_told(tmp_path, kind: str, collector: str):
    """Not in any log, at the most talkative level; not by any route; not in a trace; and not when a
    configuration is printed."""
    keys = tmp_path / "keys"
    keys.write_text("alice file-s3cret\n")
    fields = {
        "api_key": "user-s3cret",
        "admin_api_key": "admin-s3cret",
        "api_key_file": str(keys),
        "access_log": kind,
        "log_level": "debug",
        "otlp_traces_endpoint": collector,
    }
    told = []
    with serving("normal", **fields) as server:
        with httpx.Client(base_url=server.url()) as client:
            for key in ("none", *SECRETS):
                for path in ("/v1/models", "/server_info", "/metrics", "/flush_cache", "/nowhere"):
                    for headers in (bearer(key), {"x-api-key": key}, {}):
                        told.append(client.get(f"{path}?key={key}", headers=headers).text)
                told.append(client.post(CHAT, json=BODY, headers=bearer(key)).text)
                told.append(client.post(CHAT, content=b"{", headers=bearer(key)).text)
        server.process.terminate()
        assert server.end() == 0
        said = server.said
    assert "alice" in said, "the name of a key is told"
    assert said.count("status" if kind == "text" else '"status"') > 50
    assert any('"served_model_name"' in text for text in told)
    spans = "".join(map(str, Collector.spans))
    assert "tetrad.key_name" in spans
    for secret in SECRETS:
        assert secret not in said
        assert secret not in "".join(told)
        assert secret not in spans


def test_a_printed_configuration_holds_no_secret():
    config = ServeConfig(
        api_key=SECRETS[0],
        admin_api_key=SECRETS[1],
        ssl_keyfile_password=SECRETS[3],
        ssl_certfile="c",  # type: ignore[arg-type]
    )
    for secret in SECRETS:
        assert secret not in repr(config)
        assert secret not in str(config)


def test_weights_tell_their_size_in_the_file_where_it_is_another():
    def held(memory: int, stored: int) -> str:
        return _held("int8", {"memory_bytes": memory, "stored_bytes": stored})

    assert held(2000, 2000) == "2 kB int8"
    assert held(2000, 500) == "2 kB int8 (stored in 0.5 kB)"
    assert held(2000, 0) == "2 kB int8 (of the tied table)"


def test_each_note_is_a_line():
    """Also of several in a row, and between two words of the same phase."""
    stream = io.StringIO()
    console = Console(stream)
    for phase, detail in (("graphs", "1"), ("note", "a"), ("note", "b"), ("graphs", "2")):
        console.progress(EngineProgress(phase, detail))
    assert stream.getvalue() == "  graphs 1\n  note a\n  note b\n"
