"""A backend that gives NaN is found, replaced, and costs no request its answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.fakes import (
    FakeRunner,
    expected_output,
    make_limits,
    make_request,
    make_scheduler,
)
from tests.engine.test_graphs import FakeRecorder
from tests.factories import tiny_glm_folder
from tetrad.core.config import ServeConfig
from tetrad.core.plan import StepPlan
from tetrad.core.request import Request, RequestOutput
from tetrad.data import embedded_model
from tetrad.engine.engine import Engine
from tetrad.engine.graphs import DecodeGraphs, GraphPlan
from tetrad.engine.guard import NanGuard
from tetrad.engine.load import load_engine
from tetrad.engine.runner import Runner
from tetrad.kernels.backend import Backend

PROMPT = [(7 * i * i + 3) % 126 + 2 for i in range(150)]
WAYS: list[dict[str, Any]] = [
    {"disable_overlap_schedule": True},
    {},
    {"num_continuous_decode_steps": 4},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_glm_folder(tmp_path_factory.mktemp("tiny"))


def load(folder: Path, **flags: Any) -> Engine:
    engine = load_engine(ServeConfig(**{"model": folder, "device": "cpu", **flags}))
    assert isinstance(engine.runner, Runner)
    engine.runner.cache.poison()
    return engine


def run(engine: Engine, requests: Sequence[Request]) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {request.rid: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            outputs[output.rid].append(output)
        engine.check_integrity()
    return outputs


def told(outputs: dict[str, list[RequestOutput]]) -> dict[str, Any]:
    return {
        rid: ([i for output in each for i in output.token_ids], each[-1].finish)
        for rid, each in outputs.items()
    }


def requests() -> list[Request]:
    return [
        make_request("a", PROMPT[:70], 12, temperature=0.0),
        make_request("b", PROMPT[5:40], 9, seed=3, temperature=0.9),
        make_request("c", PROMPT[9:29], 15, temperature=0.0),
    ]


def guard_of(engine: Engine) -> NanGuard:
    assert isinstance(engine._guard, NanGuard)
    return engine._guard


def break_op(
    engine: Engine, op: str, is_broken: Callable[[int], bool], *, prepare: Any = None
) -> list[int]:
    """Put a backend behind `op` that gives NaN for some numbers of rows; returns those it saw."""
    switch = guard_of(engine)._switches[op]
    sound, seen = switch.backend, []

    def spoil(result: Any) -> Any:
        if isinstance(result, tuple):
            return tuple(map(spoil, result))
        is_float = isinstance(result, torch.Tensor) and result.is_floating_point()
        return torch.full_like(result, torch.nan) if is_float else result

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(len(x))
        result = sound.run(x, *args, **kwargs)
        return spoil(result) if is_broken(len(x)) else result

    switch.backend = Backend("broken", run, prepare=prepare or sound.prepare)
    return seen


@pytest.mark.parametrize(
    "flags",
    [*WAYS, pytest.param({"device": "cuda", "dtype": "float32"}, marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize(
    ("op", "place"),
    [
        ("mla", "layer 0"),
        ("latents", "layer 0"),
        ("route_activate", "layer 1"),
        ("rms_norm", "outside the layers"),
    ],
)
def test_a_backend_that_gives_nan_for_some_shape_is_replaced(
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    flags: dict[str, Any],
    op: str,
    place: str,
):
    expected = told(run(load(folder, **flags), requests()))
    engine = load(folder, **flags)
    seen = break_op(engine, op, lambda num_rows: num_rows == 3)
    with caplog.at_level(logging.WARNING, "tetrad.engine.guard"):
        assert told(run(engine, requests())) == expected
    assert 3 in seen
    (line,) = (r.getMessage() for r in caplog.records if r.name == "tetrad.engine.guard")
    successor = guard_of(engine)._switches[op].backend.name
    assert f"{place}, op {op}: backend broken" in line
    assert f"; {successor}, which passes its canary, takes over; these requests" in line
    assert successor != "broken"
    assert engine.stats().nonfinite_total == 0


@pytest.mark.parametrize("keys", ["auto", "fp8_e4m3"])
def test_a_backend_that_writes_nan_to_the_cache_is_replaced(
    folder: Path, keys: str, caplog: pytest.LogCaptureFixture
):
    """Its slots alone are looked at: most of a pool was never written."""
    expected = told(run(load(folder, kv_cache_dtype=keys), requests()))
    engine = load(folder, kv_cache_dtype=keys)
    switch = guard_of(engine)._switches["latents"]
    sound = switch.backend

    def spoiling(query: Any, *args: Any) -> Any:
        latent, pool, index_pool = sound.run(query, *args)
        if len(query) == 3:
            spoiled = torch.nan if keys == "auto" else 0xFF
            pool.view(-1, pool.shape[-1])[args[-3]] = spoiled
        return latent, pool, index_pool

    switch.backend = Backend("broken", spoiling)
    assert told(run(engine, requests())) == expected
    assert "layer 0, op latents: backend broken made them of finite numbers; torch" in caplog.text


def test_only_the_step_that_fails_pays_for_it(folder: Path):
    """No op is watched before anything is wrong, nor after."""
    engine = load(folder)
    break_op(engine, "mla", lambda num_rows: num_rows == 3)
    run(engine, requests())
    assert all(switch.watch is None for switch in guard_of(engine)._switches.values())
    assert type(guard_of(engine)._model.layers[0]).__name__ == "DecoderLayer"


def test_a_backend_that_nobody_can_replace_fails_the_requests_and_is_named(
    folder: Path, caplog: pytest.LogCaptureFixture
):
    """The others read weights that lie otherwise in memory."""
    engine = load(folder)
    break_op(engine, "experts", lambda num_rows: num_rows == 3, prepare=lambda weight, _: weight)
    outputs = told(run(engine, requests()))
    reasons = {finish.reason for _, finish in outputs.values()}
    assert reasons == {"error"}
    assert "layer 1, op experts: backend broken made them of finite numbers, and no" in caplog.text
    assert "these requests fail" in caplog.text


def test_what_does_not_happen_again_is_tried_again(folder: Path, caplog: pytest.LogCaptureFixture):
    expected = told(run(load(folder), requests()))
    engine = load(folder)
    calls = iter(range(10**6))
    break_op(engine, "mla", lambda num_rows: num_rows == 3 and next(calls) == 2)
    assert told(run(engine, requests())) == expected
    assert "it did not happen again; these requests are computed again" in caplog.text
    assert guard_of(engine)._switches["mla"].backend.name == "broken"


def test_what_keeps_happening_in_graphs_alone_ends_them(
    folder: Path, caplog: pytest.LogCaptureFixture
):
    expected = told(run(load(folder), requests()))
    engine = load(folder)
    assert isinstance(engine.runner, Runner)
    unused = GraphPlan((1,), 16, 100, scratch_page=0)
    engine.runner.graphs = DecodeGraphs(
        lambda batch: batch.kv_lens, unused, FakeRecorder(), torch.device("cpu")
    )
    calls = iter(range(10**6))
    break_op(engine, "mla", lambda num_rows: num_rows == 3 and next(calls) in (2, 20))
    assert told(run(engine, requests())) == expected
    assert "2 times by now; steps run without graphs; these requests" in caplog.text
    assert engine.runner.graphs is None


class HopefulGuard:
    """Says yes, and looks at what it is shown."""

    def __init__(self, runner: FakeRunner) -> None:
        self.runner = runner
        self.without_pages: set[str] = set()
        """Who has ended since the step was launched."""
        self.num_calls = 0

    def cure(self, plan: StepPlan, rids: Any) -> bool:
        self.num_calls += 1
        assert all(min(work.token_ids) >= 0 for work in plan.sequences)
        for work in plan.sequences:
            assert (set(work.pages) == {16}) == (work.rid in self.without_pages)
        self.runner.spoiled.clear()
        return True


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("bad", ["a", "b", "c"])
def test_who_begins_anew_loses_no_token_and_no_place(overlap: bool, bad: str):
    limits = make_limits(16)
    runner = FakeRunner(16)
    guard = HopefulGuard(runner)
    engine = Engine(make_scheduler(limits), runner, overlap=overlap, guard=guard)
    wanted = [make_request(rid, 70 + i, 60, seed=i) for i, rid in enumerate("abc")]
    for request in wanted:
        engine.add(request)
    engine.add(make_request("gone", 5, 50))
    heard: dict[str, list[int]] = {}
    for number in range(400):
        if number == 20:
            runner.spoiled.add(bad)
        if number == 21:
            engine.abort("gone")
            guard.without_pages.add("gone")
        for output in engine.step():
            assert output.finish is None or output.finish.reason == "length"
            heard.setdefault(output.rid, []).extend(output.token_ids)
        engine.check_integrity()
    assert guard.num_calls >= 1
    for request in wanted:
        assert heard[request.rid] == expected_output(request, request.sampling.seed or 0)


def test_hope_ends(folder: Path):
    """A request that keeps failing is given up."""
    runner = FakeRunner(16)

    class Stubborn(HopefulGuard):
        def cure(self, plan: StepPlan, rids: Any) -> bool:
            self.num_calls += 1
            return True

    guard = Stubborn(runner)
    engine = Engine(make_scheduler(), runner, guard=guard)
    engine.add(make_request("a", 10, 5))
    runner.spoiled.add("a")
    outputs = [output for _ in range(20) for output in engine.step()]
    assert [output.finish.reason for output in outputs if output.finish] == ["error"]
    assert guard.num_calls == 3


@pytest.mark.gpu
def test_recorded_steps_are_recorded_again_with_another_backend(caplog: pytest.LogCaptureFixture):
    """The broken backend runs in a graph, where nobody can look: the step is computed without."""
    config = {"model": embedded_model(), "device": "cuda", "max_running_requests": 4}
    engine = load_engine(ServeConfig(**config))  # type: ignore[arg-type]
    assert isinstance(engine.runner, Runner)
    break_op(engine, "mla", lambda num_rows: num_rows == 3)
    engine.runner.renew_graphs()
    outputs = told(run(engine, [make_request(rid, PROMPT[:30], 20) for rid in "abc"]))
    assert {finish.reason for _, finish in outputs.values()} == {"length"}
    (line,) = (r.getMessage() for r in caplog.records if r.name == "tetrad.engine.guard")
    assert "layer 0, op mla: backend broken" in line
    assert engine.runner.graphs is not None
    if not engine.runner.graphs.sizes["short"]:
        pytest.skip("the backends chosen here cannot be recorded")
