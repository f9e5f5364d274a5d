"""What goes wrong in production, done to a real server: one test for each line of
docs/reliability.md."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import Served, serving
from tests.e2e.scripted import NULL, Stream, begin
from tests.e2e.test_api_workers import (
    family,
    is_over,
    listens,
    status,
    takes_nobody,
    until,
    words_of,
    workers,
)
from tetrad.cli.child import free_port
from tetrad.data import embedded_model

TWO = (*NULL, "--api-workers", "2")


async def all_right(server: Served, first_seed: int, num: int = 16) -> None:
    """New streams, each with its own tokens; the books balance afterwards."""
    streams = [Stream(server.url, first_seed + n) for n in range(num)]
    await asyncio.gather(*(stream.run() for stream in streams))
    assert [s.error for s in streams] == [""] * num
    assert all(stream.is_right for stream in streams)
    state = await asyncio.to_thread(server.wait_idle)
    assert (state["integrity"], state["used_pages"]) == ("ok", 0)


def engine_of(server: Served) -> psutil.Process:
    (found,) = [p for p in family(server) if any(".engine." in part for part in words_of(p))]
    return found


async def test_a_hung_api_process_is_ended_and_started_anew(tmp_path):
    """It neither dies nor moves: only its missing beat tells."""
    with serving(tmp_path, *TWO, "--watchdog-timeout", "3") as server:
        streams = [Stream(server.url, seed, 2000) for seed in range(24)]
        tasks = await begin(streams)
        (victim,) = workers(server)
        victim.suspend()
        anew = re.compile(r"API process 1 was ended by signal 9; .* started anew")
        await asyncio.to_thread(until, lambda: anew.search(server.log))
        await asyncio.to_thread(until, lambda: any(stream.error for stream in streams))
        await asyncio.to_thread(until, lambda: listens(server, 2))
        broken = [stream for stream in streams if stream.error]
        assert re.search(r"API process 1 has not moved for 3 s; its threads are at", server.log)
        for task in tasks:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert 0 < len(broken) < len(done)
        assert all(stream.is_own for stream in streams)
        await all_right(server, 100)


async def test_a_hung_first_process_is_ended_and_the_server_with_it(tmp_path):
    """The others tell their clients why; those of the hung one see their connection break."""
    with serving(tmp_path, *NULL, "--api-workers", "3", "--watchdog-timeout", "3") as server:
        streams = [Stream(server.url, seed, 4000) for seed in range(24)]
        tasks = await begin(streams)
        everyone = family(server)
        psutil.Process(server.process.pid).suspend()
        began = time.monotonic()
        assert await asyncio.to_thread(server.process.wait, 30) == -signal.SIGKILL
        assert time.monotonic() - began < 3 + 10  # on a busy machine
        await asyncio.wait_for(asyncio.gather(*tasks), 10)
        sentence = "API process 0 has not moved for 3 s, so the server was ended."
        told = [stream.error for stream in streams]
        assert 0 < told.count(sentence) < len(streams)
        assert all(error == sentence or error.startswith("Client") for error in told)
        assert all(stream.is_own for stream in streams)
        assert "API process 0 has stopped; its threads are at:" in server.log
        assert server.log.count(f"error: {sentence}") == 1
        await asyncio.to_thread(until, lambda: all(map(is_over, everyone)))


async def test_an_api_process_that_cannot_start_again_is_told_by_health(tmp_path):
    """Here its tokenizer cannot be read any more; when it can, all is well again."""
    model = tmp_path / "model"
    shutil.copytree(embedded_model(), model)
    with serving(tmp_path, str(model), *TWO) as server:
        tokenizer = model / "tokenizer.json"
        text = tokenizer.read_text()
        tokenizer.write_text("{")
        workers(server)[0].kill()
        await asyncio.to_thread(until, lambda: health(server) == 503)
        with pytest.raises(urllib.error.HTTPError) as refusal:
            await asyncio.to_thread(urllib.request.urlopen, f"{server.url}/health")
        told = refusal.value.read().decode()
        assert re.match(r"API process 1 could not be started \d times in a row", told)
        await all_right(server, 0)  # the other one serves on
        assert "cannot be read as a tokenizer" in server.log
        assert re.search(r"started anew in [\d.]+ s; this was time 3 in a row", server.log)
        tokenizer.write_text(text)
        await asyncio.to_thread(until, lambda: health(server) == 200, 60.0)
        await asyncio.to_thread(until, lambda: listens(server, 2))
        await all_right(server, 100)


async def ends_with(server: Served, streams: list[Stream], sentence: str) -> None:
    """Every client is told, and the server ends with exit code 5 and the same sentence."""
    tasks = [asyncio.create_task(stream.run()) for stream in streams]
    for task in tasks:
        told = (await asyncio.wait_for(task, 60)).error
        assert re.search(sentence, told), told
    code = await asyncio.to_thread(server.process.wait, 60)
    assert code == 5, server.log
    assert re.search(rf"^error: .*{sentence}", server.log.splitlines()[-1])


async def test_a_step_that_never_ends_is_shown_and_told(tmp_path):
    flags = ("--load-format", "null", "--null-step-ms", "60000", "--watchdog-timeout", "2")
    with serving(tmp_path, *flags, "--api-workers", "2") as server:
        streams = [Stream(server.url, seed) for seed in range(8)]
        await ends_with(server, streams, r"its step has been running for \d+ s and --watchdog-time")
        assert "The engine is stuck; its threads are at:" in server.log
        assert re.search(r'engine/null\.py", line \d+ in wait', server.log)


async def test_a_suspended_engine_is_told(tmp_path):
    with serving(tmp_path, *TWO, "--watchdog-timeout", "2") as server:
        engine_of(server).suspend()
        streams = [Stream(server.url, seed) for seed in range(8)]
        await ends_with(server, streams, r"it has been silent for \d+ s and --watchdog-timeout")


async def test_nobody_is_told_anything_vague_while_the_engine_dies(tmp_path):
    """Requests that come between its death and the end of the server, too."""
    with serving(tmp_path, *TWO) as server:
        running = [Stream(server.url, seed, 4000) for seed in range(16)]
        tasks = await begin(running)
        engine_of(server).kill()
        late: list[asyncio.Task[Stream]] = []
        while server.process.poll() is None:
            late.append(asyncio.create_task(Stream(server.url, 1).run()))
            await asyncio.sleep(0.01)
        await asyncio.wait_for(asyncio.gather(*tasks, *late), 60)
        assert {stream.error for stream in running} == {
            "The engine process was killed (signal 9). If nobody did it, the system ran out of "
            "memory: lower --mem-fraction-static."
        }
        for task in late:
            told = task.result().error
            # Once the port is closed there is nobody to say anything.
            assert "was killed (signal 9)" in told or re.match(r"Client\w+Error|Server", told), told


async def test_a_full_disk_for_the_log_stops_nothing(tmp_path):
    """Of the API processes, the engine, and whatever they say while they start and end."""
    port = free_port()
    command = [sys.executable, "-m", "tetrad", "serve", "--port", str(port), *TWO]
    with (
        Path("/dev/full").open("wb") as full,
        subprocess.Popen([*command, "--log-level", "debug"], stdout=full, stderr=full) as process,
    ):
        try:
            server = Served(f"http://127.0.0.1:{port}", process, tmp_path / "none")
            await asyncio.to_thread(
                until, lambda: process.poll() is None and health(server) == 200, 60.0
            )
            await all_right(server, 0)
            victim = workers(server)[0]
            victim.kill()
            await asyncio.to_thread(until, lambda: listens(server, 1))
            await all_right(server, 100)
            process.terminate()
            assert await asyncio.to_thread(process.wait, 30) == 0
        finally:
            process.kill()


def health(server: Served) -> int:
    """The status; 0 where the connection breaks, as those do that a killed process had."""
    try:
        return status(server, "/health")
    except OSError:
        return 0


async def test_a_storm_that_exhausts_the_cache_loses_nobody(tmp_path):
    """Five times what fits at once, and nothing kept free for what they still get: most are set
    back several times, and each gets its own tokens all the same."""
    flags = (*NULL, "--max-total-tokens", "2048", "--schedule-conservativeness", "0")
    with serving(tmp_path, *flags, "--max-running-requests", "64") as server:
        streams = [Stream(server.url, seed, 150, num_prompt=20) for seed in range(64)]
        await asyncio.gather(*(stream.run() for stream in streams))
        assert [s.error for s in streams] == [""] * len(streams)
        assert all(stream.is_right for stream in streams)
        state = await asyncio.to_thread(server.wait_idle)
        assert (state["integrity"], state["used_pages"]) == ("ok", 0)
        assert state["preemptions_total"] > 10
        assert "requests were preempted" in server.log


JUMPING = """
import time
_wall, _began = time.time, time.monotonic()
time.time = lambda: _wall() - 1e5 * (time.monotonic() - _began)
"""


async def test_a_clock_that_jumps_matters_to_nothing(tmp_path, monkeypatch):
    """A day back every second, in every process."""
    (tmp_path / "sitecustomize.py").write_text(JUMPING)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.getcwd()}")
    with serving(tmp_path, *TWO, "--watchdog-timeout", "30") as server:
        streams = [Stream(server.url, seed, 300) for seed in range(16)]
        await asyncio.gather(*(stream.run() for stream in streams))
        assert all(stream.is_right for stream in streams)
        info = await asyncio.to_thread(server.get, "/server_info")
        assert 0 < info["startup_time"] < 60
        assert await asyncio.to_thread(status, server, "/health") == 200
        server.process.terminate()
        assert await asyncio.to_thread(server.process.wait, 30) == 0, server.log
        assert "Traceback" not in server.log


async def test_sigterm_during_load_refuses_newcomers_and_ends_with_0(tmp_path):
    """Whoever is in gets all of it; who comes is told when to come back; connections that only sit
    there keep nobody."""
    with serving(tmp_path, *TWO) as server:
        port = int(server.url.rpartition(":")[2])
        sitting = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
        for number, each in enumerate(sitting):
            each.sendall(b"POST /generate HTTP/1.1\r\nContent-Length: 100\r\n\r\n{"[: 10 * number])
        running = [Stream(server.url, seed, 400) for seed in range(24)]
        tasks = await begin(running)
        server.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(until, lambda: "Ending: 24 open requests" in server.log)
        await asyncio.to_thread(until, lambda: takes_nobody(server))
        assert not any(stream.is_complete for stream in running), "it took until they had ended"
        late = [await Stream(server.url, 100 + n).run() for n in range(20)]
        refused = [stream for stream in late if stream.status]
        assert {s.status for s in refused} == {503}
        assert {s.headers["Retry-After"] for s in refused} == {"30"}
        await asyncio.gather(*tasks)
        assert all(stream.is_right for stream in running)
        began = time.monotonic()
        assert await asyncio.to_thread(server.process.wait, 60) == 0, server.log
        assert time.monotonic() - began < 30, "connections that only sit there delay the end"
        for each in sitting:
            each.close()
        assert "Traceback" not in server.log
