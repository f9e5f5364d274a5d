"""The server as a process: ports, signals, deaths, exit codes."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.house.source import ROOT
from tetrad.core.hardware import has_nvidia_driver
from tetrad.data import embedded_model, model_folder
from tetrad.server.process.launch import SAME_SIGNAL_S

LIMITED = """
import resource, sys
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
from tetrad.server.process.descriptors import allow_connections
allow_connections()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], hard)
"""
ENDLESS = {"text": "3", "stream": True, "sampling_params": {"max_new_tokens": 100_000}}


class Server:
    """A running process and what it has said on stderr."""

    def __init__(self, behaviour: str, **fields: Any) -> None:
        config = json.dumps({"port": 0, **fields})
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.serve_fake", config, behaviour],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said = ""
        self._spoke = threading.Condition()
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._spoke:
                self.said += line
                self._spoke.notify_all()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until stderr matches."""
        with self._spoke:
            found = self._spoke.wait_for(lambda: re.search(pattern, self.said), timeout=60)
        assert found, self.said
        return found

    def url(self) -> str:
        return self.wait_for(r" at (http://\S+)")[1]

    def end(self) -> int:
        """Wait for its exit and all it says; returns the exit code."""
        code = self.process.wait(timeout=60)
        self._listener.join()
        return code

    def close(self) -> None:
        self.process.kill()
        self.end()
        assert self.process.stderr is not None
        self.process.stderr.close()


@contextmanager
def serving(behaviour: str, **fields: Any) -> Iterator[Server]:
    server = Server(behaviour, **fields)
    try:
        yield server
    finally:
        server.close()


def test_it_says_what_it_serves_and_ends_when_told():
    with serving("normal", served_model_name="abacus") as server:
        url = server.url()
        assert re.match(r"http://127\.0\.0\.1:\d+$", url)
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "abacus"
        assert httpx.get(f"{url}/health").status_code == 200
        server.process.send_signal(signal.SIGINT)
        assert server.end() == 0
        server.wait_for("Ending: no request is open\\.")
        assert "  Loading weights\n" in server.said
        server.wait_for(r"device   abacus \(cpu, 8 GB\), float32")
        server.wait_for(r"weights  2\.5 MB in 0\.4 s, read at 1\.23 GB/s: 1\.5 kB nvfp4 ")
        server.wait_for(r" nvfp4 \(stored in 0\.4 kB\), 2\.5 MB bf16\n")
        server.wait_for(r"cache    4096 tokens")
        server.wait_for(r"memory   4 requests at once, as asked")
        server.wait_for(r"limits   256 tokens a request, 4 requests at once")
        server.wait_for(r"kernels  torch: rope, mla\n +not beads: no wire\.")
        assert "Traceback" not in server.said


def test_it_serves_although_nobody_reads_what_it_says():
    """As in `tetrad serve 2>&1 | head -1`: head closes the pipe while the server starts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.server.serve_fake", json.dumps({"port": port})]
    with subprocess.Popen([*command, "normal"], cwd=ROOT, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        process.stderr.close()
        wait_healthy(port, process)
        process.terminate()
        assert process.wait(60) == 0


def test_a_taken_port_is_told_before_the_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with serving("normal", port=port) as server:
            assert server.end() == 2
            server.wait_for("--port 0 for a free one")
            (line,) = server.said.splitlines()
            assert line.startswith(f"error: Port {port} on 127.0.0.1 cannot be had")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp": 2}, "--tp 2 is not supported"),
        ({"model": "/nowhere"}, "/nowhere is not a folder"),
        ({"model": str(ROOT / "README.md")}, "README.md is a file, but no GGUF file; MODEL is a"),
        ({"model": "glm-5"}, "glm-5 names shapes only, and no folder here is called so; --load-"),
        ({"host": "203.0.113.1"}, "this machine has no such address"),
        ({"host": "no.such.host.invalid"}, "--host no.such.host.invalid cannot be used"),
    ],
)
def test_what_cannot_be_is_one_sentence(fields: dict[str, Any], message: str):
    with serving("normal", **fields) as server:
        assert server.end() == 2
        server.wait_for(re.escape(message))
        assert len(server.said.splitlines()) == 1


def test_an_engine_that_refuses_the_model_ends_the_server_with_its_sentence():
    with serving("refuses") as server:
        assert server.end() == 2
        server.wait_for(r"error: model\.norm\.weight is missing\.")
        assert "Traceback" not in server.said


def test_a_signal_while_loading_ends_it():
    with serving("slow to load") as server:
        server.wait_for("Loading weights")
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0


@pytest.mark.parametrize(
    ("fields", "is_warned"),
    [
        ({"host": "0.0.0.0"}, True),
        ({"host": "0.0.0.0", "api_key": "k"}, False),
        ({"host": "0.0.0.0", "admin_api_key": "k"}, True),
        ({"host": "localhost"}, False),
        ({}, False),
    ],
)
def test_an_open_address_without_a_key_is_warned_about(fields: dict[str, Any], is_warned: bool):
    """It is on this machine alone unless asked for."""
    with serving("normal", **fields) as server:
        assert re.match(r"http://(127\.0\.0\.1|localhost):", server.url())
        said = re.search(r"Warning: --host 0\.0\.0\.0 without --api-key", server.said)
        assert bool(said) == is_warned


@pytest.mark.parametrize(
    "fields",
    [
        {"api_key_file": "/nowhere/keys"},
        {"ssl_certfile": "/nowhere/certificate"},
        {"model": str(ROOT / "docs")},
        {"device": "cuda"},
        {"quantization": "int8"},
        {"quantization": "int8", "load_format": "dummy"},
    ],
)
def test_what_is_wrong_with_the_flags_is_told_before_the_port_is_tried(fields: dict[str, Any]):
    if fields.get("device") == "cuda" and has_nvidia_driver():
        pytest.skip("this machine has a driver")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with serving("normal", port=port, **fields) as server:
            assert server.end() == 2
            assert len(server.said.splitlines()) == 1
            assert "Port" not in server.said


def lines_of(response: httpx.Response) -> list[str]:
    return [line for line in response.iter_lines() if line]


def test_it_drains_then_ends():
    with serving("normal") as server:
        body = {"text": "3" * 100, "stream": True}
        with httpx.stream("POST", f"{server.url()}/generate", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            server.wait_for("Ending: 1 open requests have 30 s")
            refused = httpx.post(f"{server.url()}/generate", json=body)
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "30"
            assert httpx.get(f"{server.url()}/health").status_code == 503
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.end() == 0


def test_what_does_not_finish_in_time_is_told():
    with (
        serving("endless", drain_timeout=0.2) as server,
        httpx.stream("POST", f"{server.url()}/generate", json=ENDLESS) as response,
    ):
        server.process.send_signal(signal.SIGTERM)
        last = lines_of(response)[-1]
        assert "shut down before this request was finished" in last
        assert server.end() == 0


def test_a_second_signal_ends_at_once():
    with (
        serving("endless") as server,
        httpx.stream("POST", f"{server.url()}/generate", json=ENDLESS),
    ):
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("a second signal ends at once")
        server.process.send_signal(signal.SIGTERM)  # so soon it is the same one
        time.sleep(2 * SAME_SIGNAL_S)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("dies", r"The engine ran out of luck\."),
        ("sticks", r"The engine is stuck: its step has been running for 2 s"),
    ],
)
def test_an_engine_that_dies_or_sticks_ends_everything_with_the_reason(
    behaviour: str, message: str
):
    fields = {"watchdog_timeout": 1.0} if behaviour == "sticks" else {}
    with serving(behaviour, **fields) as server:
        try:
            with httpx.stream("POST", f"{server.url()}/generate", json=ENDLESS) as response:
                last = lines_of(response)[-1]
            # A stuck engine may be ending the server when this request comes, or have ended it.
            came_too_late = behaviour == "sticks" and response.status_code == 503
            assert came_too_late or re.search(message, last)
        except httpx.HTTPError:
            assert behaviour == "sticks"
        assert server.end() == 5
        server.wait_for(f"error: {message}")
        assert "Traceback" not in server.said


def test_as_many_connections_as_the_system_allows():
    """Whatever the shell said."""
    told = subprocess.run([sys.executable, "-c", LIMITED], cwd=ROOT, capture_output=True, text=True)
    allowed, hard = map(int, told.stdout.split())
    assert allowed == (min(hard, 2**20) if hard >= 0 else 2**20)


def test_more_connections_than_the_system_allows_are_closed_at_once():
    command = f"ulimit -n 100; exec {sys.executable} -m tests.server.serve_fake '{{}}' normal"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = command.replace("{}", json.dumps({"port": port}))
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(["bash", "-c", command], cwd=ROOT, stderr=said) as process,
    ):
        try:
            wait_healthy(port, process)
            said.seek(0)
            assert b"lets this process open 100 files" in said.read()
            held = [socket.create_connection(("127.0.0.1", port)) for _ in range(150)]
            with pytest.raises(httpx.TransportError):
                httpx.get(f"http://127.0.0.1:{port}/health", timeout=0.5)
            said.seek(0)
            assert said.read().count(b"Clients are turned away, 1 so far") == 1
            for each in held:
                each.close()
            wait_healthy(port, process)
        finally:
            process.terminate()
        assert process.wait(60) == 0


def wait_healthy(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                return
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_embedded_model_goes_by_its_name(tmp_path, monkeypatch):
    """Unless a folder of that name is here."""
    monkeypatch.chdir(tmp_path)
    assert model_folder(None) == model_folder(Path("abacus")) == embedded_model()
    (tmp_path / "abacus").mkdir()
    assert model_folder(Path("abacus")) == Path("abacus")
    assert model_folder(None) == embedded_model()
