"""An operator's orders: abort, pause, continue, profile, log level; whichever process is told."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.engine.fakes import (
    FakeRunner,
    expected_output,
    make_request,
    make_scheduler,
)
from tests.engine.test_client import SOON_S
from tests.engine.test_workers import Shared, collect, shared  # noqa: F401 - a fixture
from tetrad.core.errors import UserError
from tetrad.core.messages import LogSettings
from tetrad.core.request import RequestOutput
from tetrad.data import embedded_model
from tetrad.engine.engine import Engine


def engine_of(**options: object) -> Engine:
    return Engine(make_scheduler(), FakeRunner(16), **options)  # type: ignore[arg-type]


def finish_of(output: RequestOutput) -> str | None:
    return output.finish.reason if output.finish else None


@pytest.mark.parametrize("rid", ["a", "http-1", None])
def test_a_request_is_aborted_by_its_rid_or_its_http_request_s(rid: str | None):
    engine = engine_of()
    engine.add(replace(make_request("0.1.a", new=50), request_id="http-1", client_rid="a"))
    engine.add(make_request("b", new=5))
    for _ in range(3):
        engine.step()
    ended = engine.end(rid)
    assert {o.rid: finish_of(o) for o in ended} == {"0.1.a": "abort"} | (
        {"b": "abort"} if rid is None else {}
    )
    engine.check_integrity()
    while engine.has_work:
        assert all(o.rid == "b" for o in engine.step())
    assert engine.stats().used_pages == 0


@pytest.mark.parametrize(
    ("name", "own", "answer_id", "is_meant"),
    [
        ("job", "job", "", True),
        ("job", "job-0", "job", True),
        ("job-0", "job-0", "job", True),
        ("job", "job-7", "", False),
        ("job", "job-x", "", False),
        ("", "job", "", False),
    ],
)
def test_an_answer_s_id_means_all_of_its_choices(
    name: str, own: str, answer_id: str, is_meant: bool
):
    """And nobody else's request, whose client counts its own the same way."""
    assert replace(make_request(own), answer_id=answer_id).is_named(name) == is_meant


def test_what_is_held_back_goes_out_with_the_abort():
    engine = engine_of(stream_interval=10)
    engine.add(make_request("a", new=50))
    told = [t for _ in range(6) for o in engine.step() for t in o.token_ids]
    (last,) = engine.end("a")
    assert last.finish
    assert told + list(last.token_ids) == expected_output(make_request("a", new=50), 0)[:5]


@pytest.mark.parametrize("set_back", [False, True])
def test_a_pause_changes_no_token(set_back: bool):
    engine = engine_of()
    requests = [make_request(f"r{i}", 30 + i, 20, seed=i) for i in range(3)]
    for request in requests:
        engine.add(request)
    told: dict[str, list[int]] = {}

    def take(outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            told.setdefault(output.rid, []).extend(output.token_ids)

    for _ in range(4):
        take(engine.step())
    take(engine.pause())
    assert not engine.can_step
    assert all(s.num_pending == 0 for s in engine.scheduler.running)
    if set_back:
        engine.set_back()
        assert engine.stats().used_pages == 0
    engine.check_integrity()
    engine.resume()
    while engine.can_step:
        take(engine.step())
    for i, request in enumerate(requests):
        assert told[request.rid] == expected_output(request, i)


async def test_one_process_aborts_what_another_asked_for(shared: Shared):  # noqa: F811
    await shared.first.ask("pause", mode="in_place")
    task = asyncio.create_task(collect(shared.second, make_request("mine", 5, 500)))
    while not (await shared.first.state())["waiting_requests"]:
        await asyncio.sleep(0.01)
    reply = await shared.third.ask("abort", rid="mine")
    assert reply.data == {"num_aborted": 1}
    assert finish_of((await asyncio.wait_for(task, SOON_S))[-1]) == "abort"
    assert (await shared.first.ask("abort", rid="mine")).data == {"num_aborted": 0}


async def test_a_paused_engine_takes_requests_and_serves_them_later(shared: Shared):  # noqa: F811
    assert (await shared.second.ask("pause", mode="in_place")).ok
    request = make_request("later", 5, 10, seed=3)
    waiting = asyncio.create_task(collect(shared.third, request))
    while not (await shared.first.state())["waiting_requests"]:
        await asyncio.sleep(0.01)
    assert (await shared.first.state())["is_paused"] is True
    assert not waiting.done()
    await shared.first.ask("resume")
    outputs = await asyncio.wait_for(waiting, SOON_S)
    assert [t for o in outputs for t in o.token_ids] == expected_output(request, 3)


async def test_a_pause_that_aborts_ends_all(shared: Shared):  # noqa: F811
    await shared.first.ask("pause", mode="retract")
    tasks = [
        asyncio.create_task(collect(link, make_request(f"r{i}", 5, 500)))
        for i, link in enumerate(shared.all)
    ]
    while (await shared.first.state())["waiting_requests"] < 3:
        await asyncio.sleep(0.01)
    await shared.second.ask("pause", mode="abort")
    for task in tasks:
        assert finish_of((await asyncio.wait_for(task, SOON_S))[-1]) == "abort"


async def test_what_one_is_told_to_log_all_hear(shared: Shared):  # noqa: F811
    heard: list[LogSettings] = []
    for link in shared.all:
        link.on_log_settings = heard.append
    await shared.second.ask("set_logging", log_level="debug", access_log=None)
    while len(heard) < 3:
        await asyncio.sleep(0.01)
    assert heard == [LogSettings("debug", None)] * 3


async def test_what_nobody_knows_and_what_cannot_be_is_told(shared: Shared):  # noqa: F811
    reply = await shared.second.ask("dance")
    assert (reply.ok, reply.text) == (False, "The engine knows no call 'dance'.")
    reply = await shared.second.ask("start_profile", num_steps=None)
    assert not reply.ok
    assert "nothing to profile" in reply.text


def profiled(folder: Path | None) -> Engine:
    from tetrad.core.config import ServeConfig
    from tetrad.engine.load import load_engine

    config = ServeConfig(
        model=embedded_model(), device="cpu", profile_dir=folder, max_total_tokens=1024
    )
    return load_engine(config, lambda _progress: None)


def ask(engine: Engine, rid: str, new: int) -> None:
    engine.add(make_request(rid, [5, 6, 7], new))
    while engine.has_work:
        engine.step()


def test_a_profile_of_the_embedded_model_is_a_trace_in_the_operator_s_folder(tmp_path: Path):
    engine = profiled(tmp_path / "traces")
    engine.profiler.start(None)
    with pytest.raises(UserError, match="running already"):
        engine.profiler.start(None)
    ask(engine, "a", 3)
    path = Path(engine.profiler.stop())
    assert path.parent == tmp_path / "traces"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert any("aten::" in event.get("name", "") for event in events)
    with pytest.raises(UserError, match="No profile is running"):
        engine.profiler.stop()
    engine.profiler.start(2)
    ask(engine, "b", 6)
    assert len(list((tmp_path / "traces").iterdir())) == 2, "it did not end after two steps"
    assert Path(engine.profiler.stop()).exists()


def test_without_a_folder_nothing_is_profiled():
    from tetrad.engine.profiling import TorchProfiler

    with pytest.raises(UserError, match="--profile-dir"):
        TorchProfiler(None).start(None)
