"""How a server ends: drained by SIGTERM, or with a reason when its engine dies."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from typing import Any

import aiohttp
import psutil

from tests.e2e.conftest import Served, serving

FLAGS = ("--max-running-requests", "16", "--max-total-tokens", "32768")


def long_request(tokens: int = 400) -> dict[str, object]:
    sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    return {"input_ids": [5, 6, 7], "sampling_params": sampling, "stream": True}


async def events_of(url: str, started: asyncio.Event, tokens: int) -> list[dict[str, Any]]:
    """Every event of one stream, an error event included."""
    events = []
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/generate", json=long_request(tokens)) as answer,
    ):
        async for raw in answer.content:
            data = raw.strip().removeprefix(b"data: ")
            if data and data != b"[DONE]":
                events.append(json.loads(data))
                started.set()
    return events


async def test_sigterm_lets_the_running_finish(tmp_path):
    with serving(tmp_path, *FLAGS) as server:
        started = asyncio.Event()
        running = asyncio.create_task(events_of(server.url, started, tokens=200))
        await started.wait()
        server.process.send_signal(signal.SIGTERM)
        events = await running
        assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 200}
        assert await asyncio.to_thread(server.process.wait, 30) == 0, server.log
    assert not children_of(server)
    assert "leaked" not in server.log  # by libraries, of what the collector was told to leave alone


def children_of(server: Served) -> list[psutil.Process]:
    try:
        return list(psutil.Process(server.process.pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


async def test_a_killed_engine_is_an_error_for_everyone_and_an_exit_code(tmp_path):
    with serving(tmp_path, *FLAGS) as server:
        started = asyncio.Event()
        running = [
            asyncio.create_task(events_of(server.url, started, tokens=2000)) for _ in range(4)
        ]
        await started.wait()
        (engine,) = [
            child
            for child in children_of(server)
            if any("tetrad.engine.worker" in part for part in child.cmdline())
        ]
        engine.send_signal(signal.SIGKILL)
        for events in await asyncio.wait_for(asyncio.gather(*running), 30):
            assert "engine" in events[-1]["error"]["message"]
        code = await asyncio.to_thread(server.process.wait, 30)
    assert code == 5, server.log
    assert "engine" in server.log.splitlines()[-1]


def test_a_server_that_is_killed_takes_its_engine_along(tmp_path):
    with serving(tmp_path, *FLAGS) as server:
        family = children_of(server)
        assert family
        server.process.kill()
        deadline = time.monotonic() + 20
        while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family):
            assert time.monotonic() < deadline, "the engine outlived its server"
            time.sleep(0.1)
