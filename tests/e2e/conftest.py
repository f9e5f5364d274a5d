"""One real server for every test of this folder: `tetrad serve` on the embedded model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tetrad.cli.child import free_port

STARTUP_S = 120.0


@dataclass
class Served:
    """A running `tetrad serve`."""

    url: str
    process: subprocess.Popen[bytes]
    log_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as answer:
            parsed: dict[str, Any] = json.load(answer)
        return parsed

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.url}{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            parsed: dict[str, Any] = json.load(answer)
        return parsed

    def wait_idle(self, patience_s: float = 30.0) -> dict[str, Any]:
        """The engine's state once nothing runs or waits."""
        deadline = time.monotonic() + patience_s
        while True:
            state: dict[str, Any] = self.get("/server_info")["state"]
            if state["running_requests"] == state["waiting_requests"] == 0:
                return state
            assert time.monotonic() < deadline, f"still busy after {patience_s} s: {state}"
            time.sleep(0.05)


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[Served]:
    """Start a server, wait until it is healthy, end it if the test did not."""
    port, log_path = free_port(), folder / "server.log"
    command = [sys.executable, "-m", "tetrad", "serve", "--port", str(port), *flags]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    served = Served(f"http://127.0.0.1:{port}", process, log_path)
    try:
        wait_healthy(served)
        yield served
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def has_measured(done: subprocess.CompletedProcess[str]) -> bool:
    """Whether a `tetrad bench serve` ran to its end. Its figures are not judged here: on a busy
    machine, or beside a model so small, its client may count as too slow."""
    return done.returncode == 0 or "figures are INVALID" in done.stderr


def wait_healthy(served: Served) -> None:
    deadline = time.monotonic() + STARTUP_S
    while True:
        assert served.process.poll() is None, served.log
        assert time.monotonic() < deadline, served.log
        try:
            with urllib.request.urlopen(f"{served.url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.05)


@pytest.fixture(scope="session")
def served(tmp_path_factory) -> Iterator[Served]:
    """The server everyone shares. Whatever the tests did, it must end idle, whole and with 0."""
    folder = tmp_path_factory.mktemp("served")
    with serving(folder, "--max-running-requests", "64", "--max-total-tokens", "65536") as server:
        yield server
        state = server.wait_idle()
        assert state["integrity"] == "ok"
        assert state["used_pages"] == 0
        server.process.terminate()
        assert server.process.wait(30) == 0, server.log
