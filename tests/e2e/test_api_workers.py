"""`tetrad serve --api-workers`: one server to the outside, whatever process answers."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import aiohttp
import psutil
import pytest

from tests.e2e.conftest import Served, serving

FLAGS = ("--api-workers", "2", "--max-running-requests", "32", "--max-total-tokens", "65536")
OPEN = 'tetrad_worker_open_requests{{worker="{}"}}'.format
ENDLESS_TOKENS = 2000
"""So few that the cache holds 24 such requests."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Iterator[Served]:
    """Whatever the tests did, it must end idle, whole and with 0."""
    with serving(tmp_path_factory.mktemp("shared"), *FLAGS) as server:
        yield server
        state = server.wait_idle()
        assert (state["integrity"], state["used_pages"]) == ("ok", 0)
        server.process.terminate()
        assert server.process.wait(30) == 0, server.log
        assert "Traceback" not in server.log
        assert "leaked" not in server.log


def body(index: int, tokens: int = 24) -> dict[str, Any]:
    sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    ids = [5 + (7 * index + step) % 150 for step in range(3 + index % 40)]
    return {"input_ids": ids, "sampling_params": sampling, "stream": True}


class Stream:
    """One request on a connection of its own."""

    def __init__(self, url: str, index: int, tokens: int = 24, rid: str | None = None) -> None:
        self._url = url
        self._body = body(index, tokens) | ({} if rid is None else {"rid": rid})
        self.started = asyncio.Event()
        self.leave = asyncio.Event()
        self.events: list[dict[str, Any]] = []
        self.is_complete = False

    def begin(self) -> None:
        self.task = asyncio.create_task(self.run())

    async def run(self) -> list[dict[str, Any]]:
        """Its events; the connection may break."""
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self._url}/generate", json=self._body) as answer,
        ):
            async for raw in answer.content:
                data = raw.strip().removeprefix(b"data: ")
                self.is_complete = data == b"[DONE]" or self.is_complete
                if data and data != b"[DONE]":
                    self.events.append(json.loads(data))
                    self.started.set()
                if self.leave.is_set():
                    break
        return self.events

    @property
    def output_ids(self) -> list[int]:
        ids: list[int] = self.events[-1]["output_ids"]
        return ids


def metrics(server: Served) -> dict[str, float]:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def workers(server: Served) -> list[psutil.Process]:
    """Further processes that take connections."""
    found = {p: words_of(p) for p in family(server)}
    return [
        p for p, w in found.items() if "tetrad.server.process.worker" in w and "--annex" not in w
    ]


def annex(server: Served) -> psutil.Process | None:
    """The one that reads large bodies, once there is one."""
    return next((p for p in family(server) if "--annex" in words_of(p)), None)


def words_of(process: psutil.Process) -> list[str]:
    """Of its command line; none of one that has ended meanwhile."""
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []


def family(server: Served) -> list[psutil.Process]:
    return list(psutil.Process(server.process.pid).children(recursive=True))


def is_over(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


async def spread(server: Served, num: int, tokens: int = ENDLESS_TOKENS) -> list[Stream]:
    """Running streams, so many that both processes have some."""
    streams = [Stream(server.url, index, tokens) for index in range(num)]
    for stream in streams:
        stream.begin()
    await asyncio.wait_for(asyncio.gather(*(s.started.wait() for s in streams)), 60)
    return streams


async def test_streams_spread_over_both_and_each_gets_its_own_text(shared: Served):
    before = await asyncio.to_thread(metrics, shared)
    streams = [Stream(shared.url, index % 30, 60) for index in range(120)]
    running = [asyncio.create_task(stream.run()) for stream in streams]
    during: dict[str, float] = {}

    def both_are_busy() -> bool:
        during.update(metrics(shared))
        return min(during[OPEN(0)], during[OPEN(1)]) > 20

    await asyncio.to_thread(until, both_are_busy)
    await asyncio.gather(*running)
    assert during["tetrad_open_requests"] == during[OPEN(0)] + during[OPEN(1)]
    for stream in streams:
        assert stream.is_complete
        assert stream.output_ids == streams[streams.index(stream) % 30].output_ids
    alone = Stream(shared.url, 3, 60)
    await alone.run()
    assert alone.output_ids == streams[3].output_ids
    after = await asyncio.to_thread(metrics, shared)
    for name, num in (
        ('tetrad_requests_total{outcome="success",route="/generate"}', 121),
        ("tetrad_time_to_first_token_seconds_count", 121),
        ("tetrad_request_duration_seconds_count", 121),
        ("tetrad_generated_tokens_total", 121 * 60),
    ):
        assert after[name] - before.get(name, 0) == num, name


async def test_both_say_the_same(shared: Served):
    """A new connection each time: some reach one process, some the other."""
    infos = [await asyncio.to_thread(shared.get, "/server_info") for _ in range(16)]
    assert {info["api_workers"] for info in infos} == {2}
    assert {info["scheduler_info"]["status"] for info in infos} == {"ready"}
    assert {info["state"]["integrity"] for info in infos} == {"ok"}
    assert len({info["startup_time"] for info in infos}) == 1
    cards = [await asyncio.to_thread(shared.get, "/v1/models") for _ in range(16)]
    assert all(card == cards[0] for card in cards)
    commands = {info["launch_command"] for info in infos}
    assert len(commands) == 1
    assert " serve --port " in commands.pop()
    assert {json.dumps(info["engine"]) for info in infos} == {json.dumps(infos[0]["engine"])}
    assert "  api      2 processes share the port" in shared.log


async def test_those_who_leave_are_aborted_on_both(shared: Served):
    streams = await spread(shared, 24)
    for stream in streams:
        stream.leave.set()
    await asyncio.gather(*(stream.task for stream in streams))
    state = await asyncio.to_thread(shared.wait_idle)
    assert (state["integrity"], state["used_pages"]) == ("ok", 0)
    assert (await asyncio.to_thread(metrics, shared))["tetrad_open_requests"] == 0


async def test_a_flush_is_the_engine_s_whoever_is_asked(shared: Served):
    streams = await spread(shared, 1)
    codes = [await asyncio.to_thread(flush, shared) for _ in range(8)]
    assert set(codes) == {400}
    streams[0].leave.set()
    await streams[0].task
    await asyncio.to_thread(shared.wait_idle)
    assert {await asyncio.to_thread(flush, shared) for _ in range(8)} == {200}


def flush(server: Served) -> int:
    request = urllib.request.Request(f"{server.url}/flush_cache", method="POST")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


async def test_a_rid_that_runs_is_refused_whichever_process_it_came_to(shared: Served):
    first = Stream(shared.url, 1, ENDLESS_TOKENS, rid="twice")
    task = asyncio.create_task(first.run())
    await asyncio.wait_for(first.started.wait(), 30)
    others = [Stream(shared.url, 1, 8, rid="twice") for _ in range(12)]
    for other in others:
        await other.run()
    first.leave.set()
    await task
    assert all("'twice' is already running" in o.events[0]["error"]["message"] for o in others)
    await asyncio.to_thread(shared.wait_idle)
    again = Stream(shared.url, 1, 8, rid="twice")
    await again.run()
    seen = first.output_ids[:8]  # fewer if it left early
    assert seen
    assert again.output_ids[: len(seen)] == seen


async def test_a_killed_worker_is_started_anew_and_only_its_own_clients_notice(shared: Served):
    streams = await spread(shared, 24)
    (victim,) = workers(shared)
    victim.kill()
    done, running = await asyncio.wait(
        [s.task for s in streams],
        timeout=5,
        return_when=asyncio.ALL_COMPLETED,
    )
    broken = [s for s in streams if s.task in done]
    assert broken
    assert running
    for stream in broken:
        assert isinstance(stream.task.exception(), aiohttp.ClientError)
    state = await asyncio.to_thread(lambda: shared.get("/server_info")["state"])
    assert state["running_requests"] == len(running), "requests of the dead are not freed"
    for stream in streams:
        stream.leave.set()
    await asyncio.gather(*running)
    await asyncio.to_thread(until, lambda: OPEN(1) in metrics(shared) and workers(shared))
    assert re.search(r"API process 1 was ended by signal 9; .* started anew", shared.log)
    assert workers(shared)[0].pid != victim.pid
    await asyncio.to_thread(until, lambda: listens(shared, 2))
    again = await spread(shared, 24, 60)
    during = await asyncio.to_thread(metrics, shared)
    await asyncio.gather(*(s.task for s in again))
    assert min(during[OPEN(0)], during[OPEN(1)]) > 0
    assert all(s.is_complete for s in again)


def until(condition, patience_s: float = 30.0) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def listens(server: Served, num: int) -> bool:
    """Whether so many sockets listen on the server's port."""
    port = int(server.url.rpartition(":")[2])
    found = [
        c
        for c in psutil.net_connections("tcp")
        if c.laddr and c.laddr.port == port and c.status == psutil.CONN_LISTEN
    ]
    return len(found) == num


async def test_sigterm_lets_the_running_finish_on_both(tmp_path):
    with serving(tmp_path, *FLAGS) as server:
        streams = await spread(server, 16, 120)
        server.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(until, lambda: "Ending: 16 open requests" in server.log)
        await asyncio.to_thread(until, lambda: takes_nobody(server))
        assert not any(stream.is_complete for stream in streams), "it took until they had ended"
        for stream in streams:
            events = await stream.task
            assert stream.is_complete
            assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 120}
        assert await asyncio.to_thread(server.process.wait, 30) == 0, server.log
    assert "Traceback" not in server.log


def takes_nobody(server: Served) -> bool:
    """Whether none of its processes takes new requests: it tells the others so, one by one."""
    return {status(server, "/health") for _ in range(24)} == {503}


def status(server: Served, path: str) -> int:
    try:
        with urllib.request.urlopen(f"{server.url}{path}", timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


async def test_what_does_not_finish_in_time_is_told_on_both(tmp_path):
    with serving(tmp_path, *FLAGS, "--drain-timeout", "0.3") as server:
        streams = await spread(server, 16)
        server.process.send_signal(signal.SIGTERM)
        for stream in streams:
            events = await asyncio.wait_for(stream.task, 30)
            assert "shut down before" in events[-1]["error"]["message"]
        assert await asyncio.to_thread(server.process.wait, 30) == 0, server.log


async def test_a_killed_engine_is_an_error_for_everyone_and_an_exit_code(tmp_path):
    with serving(tmp_path, *FLAGS) as server:
        streams = await spread(server, 16)
        everyone = family(server)
        (engine,) = [p for p in everyone if "tetrad.engine.worker" in words_of(p)]
        engine.kill()
        for stream in streams:
            events = await asyncio.wait_for(stream.task, 30)
            assert "engine process was killed" in events[-1]["error"]["message"]
        assert await asyncio.to_thread(server.process.wait, 30) == 5, server.log
        assert server.log.count("error: The engine process was killed") == 1
        # The process of its grammars ends when it hears nothing any more.
        await asyncio.to_thread(until, lambda: all(map(is_over, everyone)))


def test_a_server_that_is_killed_leaves_nobody_behind(tmp_path):
    with serving(tmp_path, *FLAGS, "--api-key", "sesame") as server:
        until(lambda: annex(server) is not None)
        everyone = family(server)
        # A further API process, the annex, the engine, and that of its grammars.
        assert len(everyone) == 4
        for process in everyone:
            assert "sesame" not in " ".join(process.cmdline())
        assert {status(server, "/v1/models") for _ in range(8)} == {401}
        server.process.kill()
        until(lambda: all(map(is_over, everyone)))


def test_a_signal_while_it_loads_ends_all(tmp_path):
    """Also those that are still starting."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tetrad", "serve", "--port", str(port), *FLAGS]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as process:
        parent = psutil.Process(process.pid)
        until(lambda: len(parent.children()) == 2)
        everyone = parent.children()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert all(map(is_over, everyone))


async def test_the_queue_s_limit_is_of_the_whole_server(tmp_path):
    flags = ("--api-workers", "2", "--max-running-requests", "4", "--max-queued-requests", "3")
    with serving(tmp_path, *flags, "--max-total-tokens", "65536") as server:
        streams = [Stream(server.url, index, 300) for index in range(40)]
        running = [asyncio.create_task(stream.run()) for stream in streams]
        await asyncio.wait(running, timeout=60)
        refused = [s for s in streams if "error" in s.events[-1]]
        assert {
            "max-queued-requests is 3" in s.events[-1]["error"]["message"] for s in refused
        } == {True}
        assert len(streams) - len(refused) == 7


def test_a_response_is_found_by_whatever_process_is_asked(shared: Served):
    """Every request has a connection of its own, which any process may get."""
    answers: list[dict[str, Any]] = []
    fields: dict[str, Any] = {"max_output_tokens": 2, "temperature": 0}
    for number in range(12):
        before = {"previous_response_id": answers[-1]["id"]} if answers else {}
        body = {"input": f"What is {number}+1?", **before, **fields}
        answers.append(shared.post("/v1/responses", body))
    lengths = [answer["usage"]["input_tokens"] for answer in answers]
    assert lengths == sorted(set(lengths))
    for answer in answers:
        assert all(shared.get(f"/v1/responses/{answer['id']}") == answer for _ in range(3))


def test_a_response_in_the_background_is_cancelled_by_whatever_process_is_asked(shared: Served):
    fields = {"background": True, "ignore_eos": True, "max_output_tokens": ENDLESS_TOKENS}
    begun = [shared.post("/v1/responses", {"input": "3+5", **fields}) for _ in range(8)]
    for response in begun:
        cancelled = shared.post(f"/v1/responses/{response['id']}/cancel", {})
        assert cancelled["status"] == "cancelled"
        assert shared.get(f"/v1/responses/{response['id']}") == cancelled
    assert shared.wait_idle()["used_pages"] == 0
