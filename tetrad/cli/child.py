"""A server to speak to: the one named, the one already running, or a child that ends with us."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tetrad.bench.options.target import server_url
from tetrad.cli.narrator import Narrator
from tetrad.cli.options import ServerChoice
from tetrad.core.errors import ConfigError, EngineDiedError, TetradError, UserError
from tetrad.core.option import KEY_PLACES

USUAL_URL = "http://127.0.0.1:30000"
GLANCE_S = 2.0
POLL_S = 0.1
STARTUP_S = 900.0
GOODBYE_S = 45.0
PR_SET_PDEATHSIG = 1

START_LINES_SHOWN = 5

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Servers are reached directly, whatever proxy the environment names."""

NO_ANSWER = (OSError, http.client.HTTPException, ValueError, TypeError)
"""What comes of asking a server for JSON that is gone or has none."""


@contextlib.contextmanager
def server(choice: ServerChoice, narrator: Narrator) -> Iterator[str]:
    """Address of a server that answers; one that was started is ended with the block. Raises
    ConfigError when the one that was named does not answer, or one does not let us in."""
    if choice.url is not None:
        url = server_url(choice.url)
        _reach(url)
        with contextlib.suppress(*NO_ANSWER):  # other servers may lack the route
            _once_ready(url, choice.api_key, narrator)
        yield url
    elif choice.model is None and _runs_already(USUAL_URL, choice.api_key, narrator):
        yield USUAL_URL
    else:
        with started(choice.model, choice.api_key, narrator) as url:
            yield url


def _reach(url: str) -> None:
    """Raise ConfigError where nobody listens."""
    parts = urllib.parse.urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), GLANCE_S).close()
    except OSError as error:
        raise nobody(url, error) from None


def nobody(url: str, error: object) -> ConfigError:
    """The sentence for a server that does not answer."""
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ConfigError(
        f"--url {url}: no server answers there ({why}); start one with `tetrad serve`, or leave "
        "--url out, and one is started for the occasion."
    )


def _runs_already(url: str, api_key: str | None, narrator: Narrator) -> bool:
    """Whether a Tetrad server answers there, once it is ready; False where nobody listens. Raises
    ConfigError for a server that wants a key, or that is none of ours: it may be the one that was
    meant, and an answer would not show that another model gave it."""
    try:
        models = _once_ready(url, api_key, narrator)
        is_ours = models["data"][0]["owned_by"] == "tetrad"
        why = "" if is_ours else "its model is another server's"
    except (ValueError, TypeError, LookupError):
        why = "it lists its models in another way"
    except (OSError, http.client.HTTPException) as error:
        if _is_refused(error):
            return False
        why = str(error) or type(error).__name__
    if why:
        raise ConfigError(
            f"What listens at {url} does not answer like a Tetrad server ({why}); --url {url} "
            "asks it all the same, and --model abacus starts a server with the embedded model."
        )
    return True


def _once_ready(url: str, api_key: str | None, narrator: Narrator) -> dict[str, Any]:
    """Its list of models, once it is no more starting; a busy engine is not asked for it. Raises
    ConfigError where another key is wanted, TetradError where it never is ready, and what get_json
    raises."""
    deadline = time.monotonic() + STARTUP_S
    is_told = False
    while True:
        try:
            return get_json(f"{url}/v1/models", api_key)
        except OSError as error:
            code = error.code if isinstance(error, urllib.error.HTTPError) else None
            if code == 401:
                raise ConfigError(_wants_key(url, api_key)) from None
            if is_told and _is_refused(error):
                raise TetradError(f"the server at {url} exited before it was ready.") from None
            if code != 503:
                raise
            if time.monotonic() >= deadline:
                raise TetradError(
                    f"the server at {url} was not ready after {STARTUP_S:g} s."
                ) from None
        if not is_told:
            narrator.say(f"waiting up to {STARTUP_S:g} s for the server at {url}: HTTP 503 ...")
            is_told = True
        time.sleep(POLL_S)


def _wants_key(url: str, api_key: str | None) -> str:
    """The sentence for a server that does not let us in."""
    wants = "wants an API key" if api_key is None else "does not take this API key"
    return f"The server at {url} {wants}; give its key with {KEY_PLACES}."


def _is_refused(error: Exception) -> bool:
    return isinstance(getattr(error, "reason", error), ConnectionRefusedError)


def get_json(url: str, api_key: str | None) -> dict[str, Any]:
    """The JSON object there. Raises OSError (HTTP errors too), ValueError or TypeError."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(url, headers=headers)
    with DIRECT.open(request, timeout=GLANCE_S) as answer:
        parsed = json.load(answer)
    if not isinstance(parsed, dict):
        raise TypeError(f"{url} did not return a JSON object")
    return parsed


@contextlib.contextmanager
def started(model: Path | None, api_key: str | None, narrator: Narrator) -> Iterator[str]:
    """Run `tetrad serve` on a free port for as long as the block lasts."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    narrator.say(f"starting a server with {model or 'the embedded model'} ...")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "server.log")
        with log.open("wb") as output:
            child = subprocess.Popen(
                _command(model, port),
                env=os.environ if api_key is None else os.environ | {"TETRAD_API_KEY": api_key},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the answer, not for the server
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
        try:
            _wait(child, url, log, narrator)
            narrator.say(f"ready after {time.monotonic() - begun:.1f} s")
            yield url
        finally:
            end(child)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _command(model: Path | None, port: int) -> list[str]:
    """Without the key, which everyone on the machine could read in a command line."""
    command = [sys.executable, "-m", "tetrad", "serve"]
    command += [] if model is None else [str(model)]
    return [*command, "--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]


def _end_with_parent() -> None:
    """In the child: be told when the parent dies, however it dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait(child: subprocess.Popen[bytes], url: str, log: Path, narrator: Narrator) -> None:
    """Until it is healthy; what it says of its start is passed on."""
    deadline = time.monotonic() + STARTUP_S
    while time.monotonic() < deadline:
        code = child.poll()
        text = log.read_text(encoding="utf-8", errors="replace")
        lines = text.splitlines()
        narrator.passing(lines[-1] if lines else "")
        if code is not None:
            last = "\n".join(lines[-START_LINES_SHOWN:])
            kind = UserError if code == UserError.exit_code else EngineDiedError
            raise kind(f"the server ended with exit code {code}:\n{last}")
        with contextlib.suppress(OSError), DIRECT.open(f"{url}/health", timeout=GLANCE_S):
            return
        time.sleep(POLL_S)
    raise TetradError(f"the server was not ready after {STARTUP_S:.0f} s.")


def end(child: subprocess.Popen[bytes]) -> None:
    """Ask it to end, and see to it that it has."""
    child.terminate()
    try:
        child.wait(GOODBYE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
