"""Every way a request can fail is seen, counted, named and shown, and makes the command fail."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tests.bench.mock_server import MockServer
from tetrad.bench.load.backends import Reading
from tetrad.bench.load.judge import verdict
from tetrad.bench.options.serve import BenchServeConfig
from tetrad.bench.report.block import block, remarks
from tetrad.bench.serve.run import bench_serve
from tetrad.cli.narrator import Narrator
from tetrad.core.errors import BenchFailure, ConfigError
from tetrad.core.records import BenchRun

BACKENDS = ("tetrad", "sglang-oai", "vllm-chat")

CASES = {
    "http 500": ("http_status", "HTTP 500: out of pages"),
    "error event": ("error_event", "the engine died"),
    "late error event": ("error_event", "the engine died (after 4 of 8 tokens)"),
    "truncated": ("truncated", "the stream ended after 4 of 8 tokens without a finish reason"),
    "broken connection": ("truncated", "the connection broke"),
    "empty": ("empty", "no token, finish reason 'stop'"),
    "nothing": ("truncated", "the stream ended after 0 of 8 tokens without a finish reason"),
    "whole": ("malformed", "asked for text/event-stream, got application/json"),
    "too many": ("long_output", "99 tokens where 8 were asked for"),
    "endless": ("endless", "lines (after 8 of 8 tokens)"),
    "early stop": ("short_output", "4 of 8 tokens although end tokens were to be ignored"),
}


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "What is 3+5?", "output_len": 8}\n' * 4)
    return path


def config(url: str, prompts, **options) -> BenchServeConfig:
    base = {
        "base_url": url,
        "dataset_name": "custom",
        "dataset_path": prompts,
        "warmup_requests": 0,
        "ready_check_timeout_sec": 0,
    }
    return BenchServeConfig.parse(base | options)


async def run(options: BenchServeConfig) -> BenchRun:
    return await bench_serve(options, Narrator(show_bar=False))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("behaviour", CASES)
async def test_a_failure_is_named_and_counts_for_nothing(behaviour: str, backend: str, prompts):
    """One healthy answer, then three bad ones: only the healthy one is in the figures."""
    kind, message = CASES[behaviour]
    server = MockServer(behaviour, healthy=1)
    async with server.running() as url:
        result = await run(config(url, prompts, backend=backend, max_concurrency=1))
    assert (result.completed, result.failed) == (1, 3)
    assert [(f.kind, f.count, f.example_request) for f in result.failures] == [(kind, 3, 1)]
    assert message in result.failures[0].example
    assert result.output_tokens == 8
    assert result.input_tokens == (1 if backend == "vllm-chat" else len("What is 3+5?"))
    assert result.latencies.e2e_ms.count == 1
    assert "Failed requests:                         3         " in block(result).splitlines()
    assert any(message in line for line in remarks(result))


@pytest.mark.parametrize("behaviour", ["abort", "malformed"])
async def test_native_answers_that_are_no_answers(behaviour: str, prompts):
    server = MockServer(behaviour)
    async with server.running() as url:
        result = await run(config(url, prompts))
    kind = {"abort": "aborted", "malformed": "malformed"}[behaviour]
    assert [(f.kind, f.count) for f in result.failures] == [(kind, 4)]


def test_tokens_that_no_event_brought_are_not_believed():
    """They would have no time to first token, and the mean would be of the others."""
    reading = Reading(output_tokens=8, finish="length")
    failure = verdict(reading, wanted=8, most=8, ignore_eos=True, stream=True)
    assert failure is not None
    assert (failure.kind, "no event brought one" in failure.message) == ("empty", True)
    assert verdict(reading, wanted=8, most=8, ignore_eos=True, stream=False) is None


async def test_what_comes_after_the_end_counts_for_nothing(prompts):
    async with MockServer("more after the end").running() as url:
        result = await run(config(url, prompts, backend="vllm-chat"))
    assert (result.completed, result.output_tokens) == (4, 32)


async def test_a_redirect_is_not_followed(prompts):
    """Else the figures would be another server's."""
    other = MockServer()
    async with other.running() as elsewhere, MockServer(moved_to=elsewhere).running() as url:
        result = await run(config(url, prompts))
    assert [(f.kind, f.count) for f in result.failures] == [("http_status", 4)]
    assert "HTTP 307" in result.failures[0].example
    assert other.bodies == []


async def test_an_account_that_is_refused_spoils_no_figure(prompts):
    async with MockServer(info_status=401).running() as url:
        result = await run(config(url, prompts))
    assert (result.completed, result.server_info) == (4, None)


@pytest.mark.parametrize("models", [5, {}, [], [None], ["mock"], [{"id": 5, "root": "x" * 5000}]])
async def test_a_list_of_models_that_is_none_names_no_model(models, prompts):
    async with MockServer(models=models).running() as url:
        assert (await run(config(url, prompts))).model is None
        with pytest.raises(ConfigError, match="names no model; give --model"):
            await run(config(url, prompts, backend="vllm"))


async def test_a_server_that_says_nothing_times_out(prompts):
    server = MockServer("hang")
    async with server.running() as url:
        result = await run(config(url, prompts, request_timeout_sec=0.2))
    assert [(f.kind, f.count) for f in result.failures] == [("timeout", 4)]


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


async def test_a_refused_connection(prompts):
    result = await run(config(f"http://127.0.0.1:{closed_port()}", prompts))
    assert [(f.kind, f.count) for f in result.failures] == [("refused", 4)]
    assert "TTFT" not in block(result), "no latency without a single success"


async def test_nobody_there_is_one_sentence(prompts):
    url = f"http://127.0.0.1:{closed_port()}"
    with pytest.raises(BenchFailure, match=r"No server answers at .*: cannot connect"):
        await run(BenchServeConfig(base_url=url, ready_check_timeout_sec=0))
    with pytest.raises(BenchFailure, match=r"No server answers at .*: cannot connect"):
        await run(config(url, prompts, ready_check_timeout_sec=0.1))


async def test_it_waits_for_a_server_that_is_starting(prompts):
    server = MockServer(models_status=[503, 200])
    async with server.running() as url:
        result = await run(config(url, prompts, ready_check_timeout_sec=30))
    assert (result.completed, result.model) == (4, "mock")


async def test_a_missing_key_is_told_before_the_run(prompts):
    async with MockServer(models_status=[401]).running() as url:
        with pytest.raises(ConfigError, match="wants an API key; give it with --api-key"):
            await run(config(url, prompts))


@pytest.mark.parametrize("backend", BACKENDS)
async def test_early_stops_are_fine_when_the_model_may_stop(backend: str, prompts):
    """The tokens that came are counted, not those that were asked for."""
    server = MockServer("early stop")
    async with server.running() as url:
        result = await run(config(url, prompts, backend=backend, disable_ignore_eos=True))
    assert (result.completed, result.failed, result.output_tokens) == (4, 0, 16)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_good_run(backend: str, prompts):
    server = MockServer()
    async with server.running() as url:
        result = await run(config(url, prompts, backend=backend, warmup_requests=2))
    assert (result.completed, result.failed, result.failures) == (4, 0, [])
    assert result.output_tokens == 32
    assert result.token_source == "server"
    assert result.latencies.ttft_ms is not None
    assert result.latencies.ttft_ms.count == 4
    assert result.model == "mock"
    assert len(server.bodies) == 6


async def test_without_streaming_only_end_to_end_is_reported(prompts):
    server = MockServer()
    async with server.running() as url:
        result = await run(config(url, prompts, disable_stream=True))
    assert (result.completed, result.output_tokens) == (4, 32)
    text = block(result)
    assert "Mean E2E Latency" in text
    for row in ("TTFT", "TPOT", "ITL", "Peak output token throughput"):
        assert row not in text
    assert any("without streaming" in line for line in remarks(result))


async def test_warm_up_prompts_begin_differently_and_failures_of_all_of_them_stop_the_run(prompts):
    server = MockServer()
    async with server.running() as url:
        await run(config(url, prompts, warmup_requests=1, flush_cache=True))
    warm, *measured = [body["text"] for body in server.bodies]
    assert warm not in measured
    assert not measured[0].startswith(warm[:3])
    assert server.flushes == 1

    broken = MockServer("http 500")
    async with broken.running() as url:
        with pytest.raises(BenchFailure, match=r"No warm-up request succeeded .*out of pages"):
            await run(config(url, prompts, warmup_requests=2))
    assert len(broken.bodies) == 2


async def test_max_concurrency_holds_and_headers_are_sent(prompts):
    server = MockServer()
    async with server.running() as url:
        options = config(url, prompts, max_concurrency=2, header=("X-Run=7",), api_key="secret")
        result = await run(options)
    assert result.peak_concurrency <= 2
    assert all(h["X-Run"] == "7" for h in server.headers)
    assert all(h["Authorization"] == "Bearer secret" for h in server.headers)


async def test_an_interrupt_keeps_what_was_measured(prompts):
    """Two good answers, then a server that hangs; the task is cancelled as Ctrl-C does."""
    server = MockServer("hang", healthy=2)
    async with server.running() as url:
        task = asyncio.create_task(run(config(url, prompts, max_concurrency=1)))
        while len(server.bodies) < 3:
            await asyncio.sleep(0.01)
        task.cancel()
        result = await task
    assert result.interrupted
    assert (result.completed, result.failed, result.unfinished) == (2, 0, 2)
    assert remarks(result)[0].startswith("INTERRUPTED: the figures cover 2 of 4 requests")


async def test_flush_cache_on_a_server_without_the_route(prompts):
    async with MockServer(flush_path=None).running() as url:
        with pytest.raises(ConfigError, match="has neither /flush_cache nor /reset_prefix_cache"):
            await run(config(url, prompts, flush_cache=True))


async def test_flush_cache_by_vllms_route(prompts):
    server = MockServer(flush_path="/reset_prefix_cache")
    async with server.running() as url:
        await run(config(url, prompts, flush_cache=True))
    assert server.flushes == 1
