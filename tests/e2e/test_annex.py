"""The process that reads large bodies: what a client sees of it, which is nothing, and what becomes
of it when it hangs, dies, or the server ends."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.e2e.conftest import Served, serving
from tests.e2e.scripted import NULL, Stream, begin
from tests.e2e.test_api_workers import annex, family, is_over, metrics, status, until
from tetrad.server.bodies.weight import LARGE_BYTES

FILL = " " * LARGE_BYTES
FLAGS = (*NULL, "--access-log", "json", "--max-running-requests", "32")


def serving_annex(server: Served) -> psutil.Process:
    """The annex, once it has answered."""
    until(lambda: annex(server) is not None)
    found = annex(server)
    assert found is not None
    return found


class Large(Stream):
    """One whose body is handed over."""

    async def run(self) -> Large:
        self._body["custom_params"] = {"fill": FILL}
        await super().run()
        return self


@pytest.fixture(scope="module", params=["1", "2"])
def server(request, tmp_path_factory) -> Iterator[Served]:
    """Whatever the tests did, it must end idle, whole and with 0."""
    folder = tmp_path_factory.mktemp("annex")
    with serving(folder, *FLAGS, "--api-workers", request.param) as server:
        yield server
        state = server.wait_idle()
        assert (state["integrity"], state["used_pages"]) == ("ok", 0)
        server.process.terminate()
        assert server.process.wait(30) == 0, server.log
        assert "Traceback" not in server.log


async def text_of(server: Served, body: dict[str, Any], fill: str) -> tuple[str, Mapping[str, str]]:
    """The text of a streamed chat, and the headers of its answer."""
    raw = json.dumps(body | {"stream": True}) + fill
    text = ""
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"{server.url}/v1/chat/completions",
            data=raw.encode(),
            headers={"Content-Type": "application/json", "X-Request-Id": "mine"},
        ) as answer,
    ):
        assert answer.status == 200
        async for line in answer.content:
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:])["choices"]
                text += "".join(
                    choice["delta"].get("reasoning_content") or "" for choice in choices
                )
        return text, answer.headers.copy()


async def test_a_chat_is_the_same(server: Served):
    body = {"messages": [{"role": "user", "content": "3"}], "max_tokens": 200, "seed": 7}
    here, its_headers = await text_of(server, body | {"ignore_eos": True}, "")
    there, headers = await text_of(server, body | {"ignore_eos": True}, FILL)
    assert there == here != ""
    assert headers["x-request-id"] == "mine"
    assert headers.keys() == its_headers.keys()
    await asyncio.to_thread(until, lambda: len(logged(server, "mine")) == 2)
    assert {line["client"] for line in logged(server, "mine")} == {"127.0.0.1"}


def logged(server: Served, request_id: str) -> list[dict[str, Any]]:
    """Lines of the access log."""
    lines = map(json.loads, re.findall(r"^\{.*\}$", server.log, re.MULTILINE))
    return [line for line in lines if line["request_id"] == request_id]


async def test_figures_are_of_the_whole_server(server: Served):
    name = 'tetrad_requests_total{outcome="success",route="/generate"}'
    before = (await asyncio.to_thread(metrics, server)).get(name, 0)
    streams = [Large(server.url, seed) for seed in range(8)]
    await asyncio.gather(*(stream.run() for stream in streams))
    assert all(stream.is_right for stream in streams)
    after = await asyncio.to_thread(metrics, server)
    assert after[name] - before == 8


async def test_while_it_stands_still_the_others_serve(server: Served):
    """So no other process ever reads a large body."""
    stopped = await asyncio.to_thread(serving_annex, server)
    large = [Large(server.url, seed) for seed in range(4)]
    await Large(server.url, 9).run()
    stopped.suspend()
    try:
        tasks = [asyncio.create_task(stream.run()) for stream in large]
        small = [Stream(server.url, 10 + seed) for seed in range(8)]
        await asyncio.gather(*(stream.run() for stream in small))
        assert all(stream.is_right for stream in small)
        assert await asyncio.to_thread(status, server, "/health") == 200
        assert not any(stream.output_ids for stream in large)
    finally:
        stopped.resume()
    await asyncio.gather(*tasks)
    assert [stream.error for stream in large] == [""] * 4
    assert all(stream.is_right for stream in large)


async def test_killed_it_is_started_anew_and_only_its_own_clients_notice(server: Served):
    victim = await asyncio.to_thread(serving_annex, server)
    large = [Large(server.url, seed, 2000) for seed in range(4)]
    small = [Stream(server.url, 10 + seed, 400) for seed in range(4)]
    tasks = await begin([*large, *small])
    victim.kill()
    await asyncio.wait_for(asyncio.gather(*tasks), 60)
    assert all(stream.is_right for stream in small)
    assert all(stream.error.startswith("Client") for stream in large)
    assert all(stream.is_own for stream in large)
    again = [Large(server.url, 100 + seed) for seed in range(4)]
    await asyncio.gather(*(stream.run() for stream in again))  # they wait for it
    assert [stream.error for stream in again] == [""] * 4
    assert all(stream.is_right for stream in again)
    assert re.search(r"API process \d was ended by signal 9; .* started anew", server.log)
    assert (await asyncio.to_thread(serving_annex, server)).pid != victim.pid
    assert await asyncio.to_thread(status, server, "/health") == 200


async def test_hung_it_is_ended_and_whoever_waits_is_served_by_the_next(tmp_path: Path):
    with serving(tmp_path, *FLAGS, "--watchdog-timeout", "3") as server:
        victim = await asyncio.to_thread(serving_annex, server)
        open_ones = [Large(server.url, seed, 2000) for seed in range(2)]
        tasks = await begin([*open_ones])
        victim.suspend()
        waiting = [Large(server.url, 10 + seed) for seed in range(2)]
        await asyncio.wait_for(asyncio.gather(*(stream.run() for stream in waiting)), 60)
        assert [stream.error for stream in waiting] == [""] * 2
        assert all(stream.is_right for stream in waiting)
        await asyncio.wait_for(asyncio.gather(*tasks), 60)
        assert all(stream.error.startswith("Client") for stream in open_ones)
        assert re.search(r"API process 1 has not moved for 3 s; its threads are at", server.log)


async def test_sigterm_lets_its_requests_finish(tmp_path: Path):
    with serving(tmp_path, *FLAGS) as server:
        streams = [Large(server.url, seed, 300) for seed in range(4)]
        tasks = await begin([*streams])
        everyone = family(server)
        server.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(until, lambda: "Ending: 4 open requests" in server.log)
        late = await Large(server.url, 20).run()
        assert (late.status, late.headers["Retry-After"]) == (503, "30")
        await asyncio.gather(*tasks)
        assert [stream.error for stream in streams] == [""] * 4
        assert all(stream.is_right for stream in streams)
        assert await asyncio.to_thread(server.process.wait, 30) == 0, server.log
        assert "Traceback" not in server.log
        assert all(map(is_over, everyone))


async def test_what_does_not_finish_in_time_is_told(tmp_path: Path):
    with serving(tmp_path, *FLAGS, "--drain-timeout", "0.3") as server:
        streams = [Large(server.url, seed, 4000) for seed in range(4)]
        tasks = await begin([*streams])
        server.process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(asyncio.gather(*tasks), 30)
        assert all("shut down before" in stream.error for stream in streams)
        assert await asyncio.to_thread(server.process.wait, 30) == 0, server.log


async def test_a_killed_engine_is_told(tmp_path: Path):
    with serving(tmp_path, *FLAGS) as server:
        streams = [Large(server.url, seed, 4000) for seed in range(4)]
        tasks = await begin([*streams])
        (engine,) = [p for p in family(server) if any(".engine." in w for w in p.cmdline())]
        engine.kill()
        await asyncio.wait_for(asyncio.gather(*tasks), 30)
        assert all("was killed (signal 9)" in stream.error for stream in streams)
        assert await asyncio.to_thread(server.process.wait, 30) == 5, server.log


def test_a_server_that_is_killed_leaves_no_annex(tmp_path: Path):
    with serving(tmp_path, *FLAGS) as server:
        left = serving_annex(server)
        server.process.kill()
        until(lambda: is_over(left))
