"""Client and engine process: start, generate, abort, every way to die, stop."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from tests.engine.fake_worker import KILLED, RAISES, SPOILED, STUCK, FakeEngineClient
from tests.engine.fakes import expected_output, make_request
from tests.factories import tiny_glm_folder
from tetrad.core.config import ServeConfig
from tetrad.core.errors import CheckpointError, ConfigError, EngineDiedError, RequestError
from tetrad.core.messages import AbortRequests, AddRequests, EngineProgress, Message
from tetrad.core.request import Request, RequestOutput
from tetrad.engine.client import EngineClient
from tetrad.engine.sinks import Outputs
from tetrad.engine.wire import decode

SOON_S = 30.0
"""Upper bound on what takes milliseconds, so that a hang fails."""


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    client = await FakeEngineClient.start(ServeConfig())
    yield client
    await client.stop()


async def collect(client: EngineClient, request: Request) -> list[RequestOutput]:
    async with asyncio.timeout(SOON_S):
        return [output async for output in client.generate(request)]


async def until(condition) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():
            await asyncio.sleep(0.01)


def pid(client: EngineClient) -> int:
    found = client.info["pid"]
    assert isinstance(found, int)
    return found


def is_alive(process: int) -> bool:
    """Is there a process of this id that is not merely waiting to be reaped?"""
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


async def test_requests_run_together_and_give_their_tokens(client: EngineClient):
    requests = [make_request(f"r{i}", 20 + 30 * i, 20, seed=i) for i in range(6)]
    results = await asyncio.gather(*(collect(client, request) for request in requests))
    for i, (request, outputs) in enumerate(zip(requests, results, strict=True)):
        assert [t for o in outputs for t in o.token_ids] == expected_output(request, i)
        assert outputs[-1].finish is not None
        assert all(o.finish is None for o in outputs[:-1])
    assert client.stats.generated_tokens_total == 120
    state = await client.state()
    assert state["integrity"] == "ok"
    assert state["running_requests"] == 0


async def test_a_refused_request_raises_before_any_output(client: EngineClient):
    with pytest.raises(RequestError, match="512 tokens > 511 maximum") as caught:
        await collect(client, make_request("a", 512))
    assert (caught.value.http_status, caught.value.param) == (400, "prompt")
    assert await collect(client, make_request("a", 5))


async def test_a_live_rid_is_refused(client: EngineClient):
    stream = client.generate(make_request("a", 5, 400))
    await anext(stream)
    with pytest.raises(RequestError, match="already running"):
        await collect(client, make_request("a", 5))
    await stream.aclose()


async def test_a_left_request_says_nothing_to_the_next_of_its_rid(client: EngineClient):
    for seed in range(20):
        left = client.generate(make_request("again", 5, 500))
        await anext(left)
        await left.aclose()
        request = make_request("again", [1, 2, 3], 5, seed=seed)
        outputs = await collect(client, request)
        assert [t for o in outputs for t in o.token_ids] == expected_output(request, seed)
        assert {o.rid for o in outputs} == {"again"}


async def test_leaving_early_aborts_in_the_engine(client: EngineClient):
    stream = client.generate(make_request("left", 5, 500))
    await anext(stream)
    await stream.aclose()
    task = asyncio.create_task(collect(client, make_request("cancelled", 5, 500)))
    await until(lambda: client.stats.running_requests)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    state = await client.state()
    assert (state["running_requests"], state["used_pages"]) == (0, 0)
    assert state["integrity"] == "ok"


async def test_a_crowd_of_which_a_third_leaves_midway(client: EngineClient):
    async def visit(i: int) -> None:
        request = make_request(f"r{i}", 20 + 7 * (i % 20), 20, seed=i)
        stream = client.generate(request)
        got: list[int] = []
        async for output in stream:
            got += output.token_ids
            if i % 3 == 0 and len(got) == 1 + i % 17:
                break
        await stream.aclose()
        expected = expected_output(request, i)
        assert got == (expected[: len(got)] if i % 3 == 0 else expected)

    async with asyncio.timeout(SOON_S):
        await asyncio.gather(*(visit(i) for i in range(90)))
    state = await client.state()
    assert (state["running_requests"], state["waiting_requests"], state["used_pages"]) == (0, 0, 0)
    assert state["integrity"] == "ok"


async def test_who_begins_in_one_turn_is_told_of_in_one_message(client: EngineClient, monkeypatch):
    """Before anything else is said: who leaves at once must not be forgotten before it is known."""
    sent: list[Message] = []
    whole = SimpleNamespace(send=lambda frame, _flags: sent.append(decode(frame)))
    monkeypatch.setattr(client, "_outgoing", whole)
    sink = Outputs("a")
    leaves = [client.begin(make_request(rid, 3), sink) for rid in "abc"]
    assert not sent
    leaves[1]()
    leave = client.begin(make_request("d", 3), sink)
    await asyncio.sleep(0)
    match sent:
        case [AddRequests([a, b, c]), AbortRequests([left]), AddRequests([d])]:
            assert [r.client_rid for r in (a, b, c, d)] == ["a", "b", "c", "d"]
            assert left == b.rid
        case _:
            raise AssertionError(sent)
    monkeypatch.undo()
    for each in (*leaves, leave):
        each()


async def test_one_that_cannot_be_told_keeps_nobody_waiting(client: EngineClient):
    good = [asyncio.create_task(collect(client, make_request(rid, 3))) for rid in "ac"]
    bad = replace(make_request("b", 3), priority=1 << 70)
    await asyncio.sleep(0)
    with pytest.raises(OverflowError):
        await collect(client, bad)
    assert client._streams.keys() == {1, 2}
    assert all([(await task)[-1].finish for task in good])


async def test_who_begins_while_the_engine_is_stopped_is_told():
    client = await FakeEngineClient.start(ServeConfig())
    stopping = asyncio.create_task(client.stop())
    await asyncio.sleep(0)
    with pytest.raises(EngineDiedError, match="was stopped"):
        await collect(client, make_request("a", 3))
    await stopping


async def test_flush(client: EngineClient):
    await collect(client, make_request("a", 200))
    assert (await client.state())["cached_pages"] == 3
    await client.ask("pause", mode="in_place")  # else it may have ended
    leave = client.begin(make_request("b", 5, 500), Outputs("b"))
    await asyncio.sleep(0)
    assert await client.flush_cache() == (False, "The cache is in use: requests run or wait.")
    leave()
    await asyncio.sleep(0)
    assert await client.flush_cache() == (True, "Cache flushed.")
    assert (await client.state())["cached_pages"] == 0


async def test_non_finite_logits_are_an_output_not_a_death(client: EngineClient):
    (failed,) = await collect(client, make_request("a", [SPOILED, 1]))
    assert failed.finish is not None
    assert failed.finish.reason == "error"
    assert await collect(client, make_request("b", 5))


async def assert_all_fail(client: EngineClient, trigger: int, sentence: str) -> None:
    """A request with `trigger` ends the engine: open requests, calls and later ones say so."""
    bystander = asyncio.create_task(collect(client, make_request("bystander", 5, 500)))
    await until(lambda: client.stats.running_requests)
    with pytest.raises(EngineDiedError, match=sentence):
        await collect(client, make_request("culprit", [trigger]))
    with pytest.raises(EngineDiedError, match=sentence):
        await bystander
    assert client.died.done()
    assert sentence in str(client.died.result())
    with pytest.raises(EngineDiedError, match=sentence):
        await collect(client, make_request("later", 5))
    with pytest.raises(EngineDiedError, match=sentence):
        await client.state()


async def test_a_step_that_raises_ends_the_engine_with_its_reason(client: EngineClient):
    await assert_all_fail(client, RAISES, "a step: RuntimeError: the fake kernel broke")


async def test_a_killed_engine_fails_everyone(client: EngineClient):
    await assert_all_fail(client, KILLED, "process was killed")


async def test_the_heart_beats_while_a_step_is_stuck(client: EngineClient):
    task = asyncio.create_task(collect(client, make_request("a", [STUCK])))
    await until(lambda: client.step_age_s > 0.4)
    assert client.last_beat_age_s < 5.0
    assert not client.died.done()
    call = asyncio.create_task(client.state())
    await asyncio.sleep(0)
    os.kill(pid(client), signal.SIGKILL)
    async with asyncio.timeout(SOON_S):
        for open_end in (task, call):
            with pytest.raises(EngineDiedError, match="was killed"):
                await open_end


async def test_signals_of_the_terminal_are_the_parent_s_to_handle(client: EngineClient):
    os.kill(pid(client), signal.SIGINT)
    os.kill(pid(client), signal.SIGTERM)
    assert await collect(client, make_request("a", 5))


async def test_stop_ends_the_process_and_open_requests():
    client = await FakeEngineClient.start(ServeConfig())
    task = asyncio.create_task(collect(client, make_request("a", 5, 500)))
    await until(lambda: client.stats.running_requests)
    await client.stop()
    with pytest.raises(EngineDiedError, match="was stopped"):
        await task
    assert not is_alive(pid(client))
    assert not client.died.done()


async def test_stop_kills_a_stuck_engine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tetrad.engine.client.STOP_GRACE_S", 0.2)
    client = await FakeEngineClient.start(ServeConfig())
    task = asyncio.create_task(collect(client, make_request("a", [STUCK])))
    await until(lambda: client.step_age_s > 0)
    await client.stop()
    assert not is_alive(pid(client))
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    ("name", "error", "sentence"),
    [
        ("bad", CheckpointError, "^the folder holds no model.$"),
        ("broken", EngineDiedError, "loading: RuntimeError: cannot load"),
    ],
)
async def test_an_engine_that_cannot_load_says_why(
    name: str, error: type[Exception], sentence: str
):
    progress: list[EngineProgress] = []
    with pytest.raises(error, match=sentence):
        await FakeEngineClient.start(ServeConfig(served_model_name=name), progress.append)
    assert progress == [EngineProgress("weights", "none")]


async def test_each_phase_of_loading_has_a_time_limit(capfd: pytest.CaptureFixture[str]):
    """It is named, and where the engine was is shown."""
    config = ServeConfig(served_model_name="slow", startup_timeout=4.0)
    with pytest.raises(EngineDiedError, match=r"at 'weights' for 4 s, the most that --startup-t"):
        await FakeEngineClient.start(config)
    assert "fake_worker.py" in capfd.readouterr().err


async def test_a_phase_that_begins_gets_the_whole_limit(monkeypatch: pytest.MonkeyPatch):
    """By a clock of the test's own; a note is no phase."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr("tetrad.engine.client.time", clock)
    client = EngineClient()
    waiting = asyncio.create_task(client._until_ready(0.05))
    for phase, at in (("weights", 0.04), ("graphs", 0.08)):
        clock.now = at
        client._progress(EngineProgress(phase))
        await asyncio.sleep(0.2)
        assert not waiting.done()
    clock.now = 0.12
    client._progress(EngineProgress("note"))
    clock.now = 0.14
    async with asyncio.timeout(SOON_S):
        with pytest.raises(EngineDiedError, match="at 'graphs'"):
            await waiting
    await client.stop()


async def test_all_are_told_one_reason_whenever_they_came(client: EngineClient):
    """Between the engine's death and the news of it too, when its sockets are gone already."""
    running = asyncio.create_task(collect(client, make_request("running", 5, 500)))
    await until(lambda: client.stats.running_requests)
    os.kill(pid(client), signal.SIGKILL)
    late = []
    for number in range(200):
        late.append(asyncio.create_task(collect(client, make_request(f"late{number}", 5))))
        await asyncio.sleep(0.005)
    errors = await asyncio.gather(running, client.state(), *late, return_exceptions=True)
    assert len({str(error) for error in errors}) == 1
    assert "process was killed" in str(errors[0])


async def test_a_crash_shows_where_it_was(capfd: pytest.CaptureFixture[str]):
    """As a kernel's would, which raises nothing."""
    client = await FakeEngineClient.start(ServeConfig())
    task = asyncio.create_task(collect(client, make_request("a", [STUCK])))
    await until(lambda: client.step_age_s > 0)
    os.kill(pid(client), signal.SIGSEGV)
    with pytest.raises(EngineDiedError, match=r"ended by signal 11 .*; its last output is above"):
        await task
    assert "in _obey" in capfd.readouterr().err
    await client.stop()


async def test_a_stuck_engine_tells_where_it_is(capfd: pytest.CaptureFixture[str]):
    client = await FakeEngineClient.start(ServeConfig())
    task = asyncio.create_task(collect(client, make_request("a", [STUCK])))
    await until(lambda: client.step_age_s > 0)
    await client.end_stuck()
    told = capfd.readouterr().err
    assert "in _obey" in told
    assert "in _beat" in told
    with pytest.raises(EngineDiedError):
        await task
    await client.stop()


ORPHAN = """
import asyncio, os
from tests.engine.fake_worker import FakeEngineClient
from tetrad.core.config import ServeConfig
async def main():
    client = await FakeEngineClient.start(ServeConfig())
    print(client.info["pid"], client._folder, flush=True)
    os._exit(0)
asyncio.run(main())
"""


def test_no_engine_outlives_its_parent():
    parent = subprocess.run(
        [sys.executable, "-c", ORPHAN], capture_output=True, text=True, check=True
    )
    process, folder = parent.stdout.split()
    deadline = time.monotonic() + SOON_S
    while is_alive(int(process)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not Path(folder).exists(), "the folder of the sockets is left behind"


async def test_a_listener_that_fails_is_told_at_once():
    """As a console does whose reader has left: nobody must wait for an engine that nobody hears."""

    def broken(_: EngineProgress) -> None:
        raise BrokenPipeError

    async with asyncio.timeout(SOON_S):
        with pytest.raises(EngineDiedError, match=r"cannot be heard any more: BrokenPipeError"):
            await FakeEngineClient.start(ServeConfig(), broken)


async def test_a_long_path_to_temporary_files_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Addresses of sockets are short: 107 bytes on Linux."""
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    client = await FakeEngineClient.start(ServeConfig())
    await client.stop()
    assert list(long.iterdir()) == []


async def test_nowhere_to_put_the_sockets_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", "/nonexistent")
    with pytest.raises(ConfigError, match="set TMPDIR to one that can be written"):
        await FakeEngineClient.start(ServeConfig())


async def test_the_key_of_the_server_is_not_on_the_engine_s_command_line():
    client = await FakeEngineClient.start(ServeConfig(api_key="sesame"))
    command = Path(f"/proc/{pid(client)}/cmdline").read_bytes()
    await client.stop()
    assert b"config-json" in command
    assert b"sesame" not in command


async def test_the_real_engine_process(tmp_path: Path):
    config = ServeConfig(model=tiny_glm_folder(tmp_path / "tiny"), device="cpu")
    client = await EngineClient.start(config)
    try:
        outputs = await collect(client, make_request("a", 70, 5, temperature=0.0, num_logprobs=1))
        assert len(outputs) == 5
        assert outputs[0].logprobs[0].token_id == outputs[0].token_ids[0]
        assert client.info["max_total_tokens"] > 0
        assert (await client.state())["integrity"] == "ok"
    finally:
        await client.stop()


async def test_a_stray_file_in_the_current_folder_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "zmq.py").write_text("raise RuntimeError('stray')")
    monkeypatch.chdir(tmp_path)
    client = await FakeEngineClient.start(ServeConfig())
    await client.stop()


async def test_the_real_engine_refuses_a_folder_that_is_no_model(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        await EngineClient.start(ServeConfig(model=tmp_path))
