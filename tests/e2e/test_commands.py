"""`tetrad chat`, `tetrad bench serve` and `tetrad eval` against the real server."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import psutil
import pytest

from tests.e2e.conftest import Served, has_measured
from tetrad.cli.child import server
from tetrad.cli.narrator import Narrator
from tetrad.cli.options import ServerChoice
from tetrad.core.records import BenchRun
from tetrad.data import embedded_model


def tetrad(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tetrad", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, **options)


@pytest.mark.parametrize("backend", ["tetrad", "sglang-oai", "sglang-oai-chat"])
@pytest.mark.parametrize("stream", [True, False])
def test_bench_serve_has_exact_lengths(backend: str, stream: bool, served: Served, tmp_path):
    results = tmp_path / "results.jsonl"
    flags = ["--num-prompts", "10", "--random-input", "70", "--random-output", "12"]
    flags += ["--random-range-ratio", "0.5", "--output-file", str(results), "--output-details"]
    flags += [] if stream else ["--disable-stream"]
    done = tetrad("bench", "serve", "--base-url", served.url, "--backend", backend, *flags)
    assert has_measured(done), done.stdout + done.stderr
    run = BenchRun.model_validate(json.loads(results.read_text())["tetrad"])
    assert (run.completed, run.failed, run.token_source) == (10, 0, "server")
    assert run.output_tokens == round(run.workload.wanted_tokens.mean * 10)
    sent = round(run.workload.prompt_tokens.mean * 10)
    assert run.input_tokens >= sent if backend.endswith("-chat") else run.input_tokens == sent
    assert run.server_info is not None
    assert run.model == "abacus"
    assert ("Mean TTFT (ms):" in done.stdout) == stream
    assert f"Failed requests:{' ' * 25}0         " in done.stdout.splitlines()


def test_bench_serve_at_a_rate_with_a_cap_and_an_empty_cache(served: Served):
    flags = ["--num-prompts", "8", "--random-input", "40", "--random-output", "6"]
    flags += ["--request-rate", "40", "--max-concurrency", "3", "--flush-cache", "--warmup", "2"]
    done = tetrad("bench", "serve", "--base-url", served.url, *flags)
    assert has_measured(done), done.stdout + done.stderr
    assert "Traffic request rate:                    40.0      " in done.stdout.splitlines()
    assert "Max request concurrency:                 3         " in done.stdout.splitlines()
    assert "prefix cache flushed" in done.stderr


def test_too_long_requests_are_failures_with_the_servers_reason(served: Served):
    flags = ["--num-prompts", "2", "--random-input", "5000", "--random-range-ratio", "1"]
    done = tetrad("bench", "serve", "--base-url", served.url, *flags, "--warmup-requests", "0")
    assert done.returncode == 6
    assert "2 x http_status" in done.stdout
    assert "HTTP 400" in done.stdout
    assert "5000" in done.stdout


def test_eval_runs_every_kind(served: Served):
    flags = ["--num-problems", "1", "--max-tokens", "40", "--json"]
    done = tetrad("eval", "--url", served.url, *flags)
    assert done.returncode == 0, done.stderr
    run = json.loads(done.stdout)
    assert run["failures"] == []
    assert run["overall"]["total"] == len(run["kinds"]) == 18


def test_a_running_server_is_recognised(served: Served, monkeypatch):
    monkeypatch.setattr("tetrad.cli.child.USUAL_URL", served.url)
    with server(ServerChoice(), Narrator()) as url:
        assert url == served.url


CHAT = [sys.executable, "-m", "tetrad", "chat", "--model", str(embedded_model())]
"""Naming a model keeps the command from asking a server that happens to run at the usual place."""


def test_chat_starts_what_it_needs_and_leaves_nothing_behind():
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    command = [*CHAT, "What is 3+5?", "--max-tokens", "40"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as chat:
        family: set[int] = set()
        while chat.poll() is None:
            family |= {c.pid for c in psutil.Process().children(recursive=True)} - before
            time.sleep(0.1)
        _, err = chat.communicate()
    assert chat.returncode == 0, err
    assert f"starting a server with {embedded_model()}" in err
    assert len(family) > 1
    wait_gone(family)


def wait_gone(family: set[int]) -> None:
    deadline = time.monotonic() + 30
    while alive := [pid for pid in family if psutil.pid_exists(pid)]:
        assert time.monotonic() < deadline, f"left behind: {alive}"
        time.sleep(0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="needs the parent-death signal of Linux")
def test_a_chat_that_is_killed_leaves_no_server_behind():
    command = [*CHAT, "Hi", "--max-tokens", "4000", "--api-key", "hush"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as chat:
        family: set[int] = set()
        while len(family) < 2:
            assert chat.poll() is None
            family |= {c.pid for c in psutil.Process(chat.pid).children(recursive=True)}
            time.sleep(0.05)
        (serve,) = psutil.Process(chat.pid).children()
        assert "hush" not in serve.cmdline()
        chat.kill()
    wait_gone(family)


def test_chat_tells_why_a_model_cannot_be_served(tmp_path):
    done = tetrad("chat", "Hi", "--model", str(tmp_path))
    assert done.returncode == 2
    assert "holds no config.json" in done.stderr
    assert "Traceback" not in done.stderr
