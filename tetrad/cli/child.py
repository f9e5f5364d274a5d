"""A server to speak to: the one named, the one already running, or a child that ends with us."""

from __future__ import annotations

import contextlib
import ctypes
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from tetrad.cli.options import ServerChoice
from tetrad.core.errors import EngineDiedError, TetradError

USUAL_URL = "http://127.0.0.1:30000"
GLANCE_S = 2.0
POLL_S = 0.1
STARTUP_S = 900.0
GOODBYE_S = 45.0
LOG_TAIL_LINES = 15
PR_SET_PDEATHSIG = 1

Say = Callable[[str], None]


@contextlib.contextmanager
def server(choice: ServerChoice, say: Say) -> Iterator[str]:
    """Address of a server that answers; one that was started is ended with the block."""
    if choice.url is not None:
        yield choice.url.rstrip("/")
    elif choice.model is None and is_tetrad(USUAL_URL, choice.api_key):
        yield USUAL_URL
    else:
        with started(choice.model, choice.api_key, say) as url:
            yield url


def is_tetrad(url: str, api_key: str | None) -> bool:
    """Whether a Tetrad server answers there, and lets us in."""
    try:
        info = get_json(f"{url}/server_info", api_key)
        models = get_json(f"{url}/v1/models", api_key)
    except (OSError, ValueError):
        return False
    return "engine" in info and models["data"][0].get("owned_by") == "tetrad"


def get_json(url: str, api_key: str | None) -> dict[str, Any]:
    """The JSON object there. Raises OSError (HTTP errors too) or ValueError."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=GLANCE_S) as answer:
        parsed = json.load(answer)
    if not isinstance(parsed, dict):
        raise TypeError(f"{url} gave no JSON object")
    return parsed


@contextlib.contextmanager
def started(model: Path | None, api_key: str | None, say: Say) -> Iterator[str]:
    """Run `tetrad serve` on a free port for as long as the block lasts."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    say(f"starting a server with {model or 'the embedded model'} ...")
    begun = time.monotonic()
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            _command(model, api_key, port),
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the answer, not for the server
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        try:
            _wait(child, url, log)
            say(f"ready after {time.monotonic() - begun:.1f} s")
            yield url
        finally:
            end(child)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _command(model: Path | None, api_key: str | None, port: int) -> list[str]:
    command = [sys.executable, "-m", "tetrad.cli.main", "serve"]
    command += [] if model is None else [str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
    return command if api_key is None else [*command, "--api-key", api_key]


def _end_with_parent() -> None:
    """In the child: be told when the parent dies, however it dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait(child: subprocess.Popen[bytes], url: str, log: IO[bytes]) -> None:
    deadline = time.monotonic() + STARTUP_S
    while time.monotonic() < deadline:
        if (code := child.poll()) is not None:
            raise EngineDiedError(f"the server ended with exit code {code}:\n{_tail(log)}")
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"{url}/health", timeout=GLANCE_S),
        ):
            return
        time.sleep(POLL_S)
    raise TetradError(f"the server was not ready after {STARTUP_S:.0f} s:\n{_tail(log)}")


def _tail(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode("utf-8", "replace").splitlines()
    return "\n".join(lines[-LOG_TAIL_LINES:])


def end(child: subprocess.Popen[bytes]) -> None:
    """Ask it to end, and see to it that it has."""
    child.terminate()
    try:
        child.wait(GOODBYE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
