"""Servers that run beside a command, which brings its own event loop."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.bench.mock_server import MockServer

Run = Callable[..., tuple[int, str, str]]


@contextmanager
def beside(server: MockServer) -> Iterator[str]:
    """Run a mock server in a thread for as long as the block lasts."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    running = server.running()
    try:
        yield asyncio.run_coroutine_threadsafe(running.__aenter__(), loop).result()
    finally:
        asyncio.run_coroutine_threadsafe(running.__aexit__(None, None, None), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture
def tetrad(monkeypatch, capsys) -> Run:
    """Run one command line in this process; gives exit code, stdout, stderr."""
    from tetrad.cli.main import main

    monkeypatch.setenv("COLUMNS", "100")
    # The mock server shares the client's cores and answers in next to no time.
    monkeypatch.setattr("tetrad.bench.figures.selfcheck.LEAST_MS", math.inf)
    monkeypatch.setattr("tetrad.bench.figures.selfcheck.MOST_SHARE", math.inf)
    for secret in ("TETRAD_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(secret, raising=False)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["tetrad", *arguments])
        code = main()
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run
