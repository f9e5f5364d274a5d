"""Backends that crash or hang, in processes that can be spared."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tetrad.core.arch import ModelArch
from tetrad.core.errors import UnsupportedError
from tetrad.data import embedded_model
from tetrad.kernels import trial, trial_process
from tetrad.kernels.backend import Rounding
from tetrad.kernels.choice import TOKENS
from tetrad.kernels.choice_cache import FILE_NAME, key_of
from tetrad.kernels.registry import OPS
from tetrad.kernels.select import resolve_here, resolve_ops
from tetrad.kernels.trial import Means, Request, TrialOutcome, try_apart
from tetrad.kernels.trial_pool import Pool, Unit, num_processes

CHILD = """
import os, signal, sys, time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tetrad.kernels import registry, select, trial_child

rope = registry.OPS["rope"]
right = rope.backends["torch"]
notes = Path(os.environ["NOTES"])

def killed(*_, **__):
    os.kill(os.getpid(), signal.SIGSEGV)

def broken(*_, **__):
    # as CUDA does it: this call looks fine, and whatever comes next finds the device lost
    def lost(_device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    trial_child._settle = lost
    return right.run(*_, **__)

def hung(*_, **__):
    time.sleep(600)

def unlucky(*_, **__):
    # as when main memory is full and somebody has to go
    if not (notes / "unlucky").exists():
        (notes / "unlucky").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return right.run(*_, **__)

def slow(*_, **__):
    (notes / f"{os.getpid()}-{time.monotonic()}-begins").touch()
    time.sleep(0.5)
    (notes / f"{os.getpid()}-{time.monotonic()}-ends").touch()
    return right.run(*_, **__)

def large(*_, **__):
    if len(__["x"]) > 100:
        killed()
    return right.run(*_, **__)

print("a library says hello")
ways = {
    "killed": killed, "broken": broken, "hung": hung, "unlucky": unlucky, "large": large,
    "slow": slow, "slow2": slow,
}
names = sys.argv[1].split(",")
backends = {name: replace(right, name=name, run=ways.get(name, right.run)) for name in names}
for name, op in registry.OPS.items():
    registry.OPS[name] = replace(op, backends={"torch": op.backends["torch"]})
registry.OPS["rope"] = replace(rope, backends=backends)
here = select.snapshot("cpu")
select.snapshot = lambda _device: replace(here, kind="cuda")
trial_child.main()
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TETRAD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("NOTES", str(tmp_path))
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


@pytest.fixture
def with_rope(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Gives rope these backends, every other op plain torch."""
    rope = OPS["rope"]
    alone = {
        name: replace(op, backends={"torch": op.backends["torch"]}) for name, op in OPS.items()
    }

    def replaced(names: str) -> None:
        backends = {name: replace(rope.backends["torch"], name=name) for name in names.split(",")}
        ops = alone | {"rope": replace(rope, backends=backends)}
        monkeypatch.setattr(trial, "OPS", ops)

    return replaced


def tried(
    names: str,
    told: list[str],
    patience_s: float = 60.0,
    num: int = 1,
    request: Request | None = None,
) -> TrialOutcome:
    means = Means((sys.executable, "-c", CHILD, names), patience_s, lambda _units: num)
    return try_apart(request or Request("cpu", torch.float32, scope="all"), told.append, means)


CALLS_OF_OTHERS = 2 * (len(OPS) - 1)


@pytest.mark.parametrize("num", [1, 2])
def test_each_that_crashes_is_left_out_and_the_others_are_tried(with_rope, num: int):
    """One that is lost beside others, for no fault of its own, gets another chance alone."""
    told: list[str] = []
    names = "first,killed,second,broken,torch" if num == 1 else "killed,broken,unlucky,torch"
    with_rope(names)
    found = tried(names, told, num=num)
    assert found.left_out == {
        ("rope", "killed"): "crashed when it was tried: its process got SIGSEGV",
        ("rope", "broken"): "crashed when it was tried: its process ended: RuntimeError: CUDA "
        "error: an illegal memory access was encountered",
    }
    calls = CALLS_OF_OTHERS + 2 * len(names.split(","))
    ways = "a process of its own" if num == 1 else "2 processes of their own"
    assert told[0] == f"compiling and trying kernels: {calls} calls in {ways}"
    assert {line.split()[2] for line in told if line.endswith("left out")} == {"killed", "broken"}
    assert found.is_fresh


def test_one_that_hangs_is_ended_once(with_rope):
    """Its other cases are not waited for."""
    with_rope("torch,hung")
    began = time.monotonic()
    found = tried("torch,hung", [], patience_s=6.0)
    assert time.monotonic() - began < 5 * 6.0
    assert found.left_out == {
        ("rope", "hung"): "crashed when it was tried: it did not come back within 6 s"
    }


def test_calls_go_on_side_by_side(with_rope, tmp_path: Path):
    with_rope("slow,slow2")
    assert tried("slow,slow2", [], num=2).left_out == {}
    notes = sorted((float(stamp), word) for _, stamp, word in (
        path.name.split("-") for path in tmp_path.glob("*-*-*")))  # fmt: skip
    assert len(notes) == 2 * 2 * 2
    running = most = 0
    for _, word in notes:
        running += 1 if word == "begins" else -1
        most = max(most, running)
    assert most == 2


def test_the_models_shapes_are_tried_before_anything_is_timed(with_rope):
    """Right at its canary's small cases, and lost at steps of more than a hundred tokens."""
    arch = ModelArch.from_folder(embedded_model())
    with_rope("large,other,torch")
    told: list[str] = []
    found = tried("large,other,torch", told, request=Request("cpu", torch.float32, arch=arch))
    assert found.left_out == {
        ("rope", "large"): "crashed when it was tried: its process got SIGSEGV"
    }
    calls = CALLS_OF_OTHERS + 2 * 3 + 2 * len(TOKENS)
    assert told[0] == f"compiling and trying kernels: {calls} calls in a process of its own"
    assert "timing rope: other" in told


def unit(num_bytes: int, kind: str = "canary") -> Unit:
    case = OPS["rope"].contract.cases[0]
    return Unit("rope", "torch", case, kind, 8, num_bytes, "cpu", torch.float32)  # type: ignore[arg-type]


def test_no_more_runs_at_once_than_memory_holds():
    small, large, huge = unit(40), unit(60), unit(500)
    pool = Pool([large, unit(60), small, huge], 4, 100, 1.0)
    assert pool._take() is large
    assert pool._take() is small, "what fits goes first"
    pool._running.clear()
    assert pool._take() is not huge
    pool._running.clear()
    assert pool._take() is huge, "alone, as it never fits"


def test_no_shape_is_begun_after_its_time():
    now = [0.0]
    units = [unit(0, "shape"), unit(0, "shape"), unit(0), unit(0, "shape")]
    pool = Pool(units, 1, 1, 10.0, clock=lambda: now[0])
    now[0] = 100.0
    assert pool._take() is units[0]
    now[0] = 109.0
    assert pool._take() is units[1]
    now[0] = 111.0
    assert pool._take() is units[2]
    assert pool._take() is None
    assert pool.waiting == [units[3]]


def test_a_small_machine_has_one_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tetrad.kernels.trial_pool.usable_processors", lambda: 2)
    assert num_processes(100) == 1
    monkeypatch.setattr("tetrad.kernels.trial_pool.usable_processors", lambda: 1 << 20)
    assert num_processes(1) == 1


def test_whoever_interrupts_leaves_no_process_behind(with_rope, monkeypatch: pytest.MonkeyPatch):
    started = []

    class Noted(trial_process.Process):
        def __init__(self, command) -> None:
            super().__init__(command)
            started.append(self._process)

    monkeypatch.setattr("tetrad.kernels.trial_pool.Process", Noted)
    command = (sys.executable, "-c", CHILD, "hung,killed")
    backends = [replace_backend(unit(0), name) for name in ("hung", "killed")]
    for tried_unit in Pool(backends, 2, 1, 1.0, command):
        assert tried_unit.unit.backend == "killed"
        break
    assert all(process.poll() is not None for process in started)


def replace_backend(one: Unit, name: str) -> Unit:
    return replace(one, backend=name)


def test_outcomes_are_kept(with_rope, monkeypatch: pytest.MonkeyPatch):
    told: list[str] = []
    with_rope("killed,torch")
    first = tried("killed,torch", told)
    count = len(told)
    monkeypatch.setattr(trial, "_Trial", None)
    second = tried("killed,torch", told)
    assert (second.left_out, second.is_fresh) == (first.left_out, False)
    assert len(told) == count


def test_what_there_was_no_time_for_is_tried_at_the_next_start(
    with_rope, monkeypatch: pytest.MonkeyPatch
):
    """And what crashed is not: one while canaries ran, one while they were timed."""
    request = Request("cpu", torch.float32, arch=ModelArch.from_folder(embedded_model()))
    names = "killed,large,other,torch"
    with_rope(names)
    told: list[str] = []
    monkeypatch.setattr(trial, "COMPILE_S", 0.0)
    first = tried(names, told, request=request)
    assert set(first.left_out) == {("rope", "killed"), ("rope", "large")}
    monkeypatch.setattr(trial, "COMPILE_S", 40.0)
    del told[:]
    second = tried(names, told, request=request)
    assert (second.left_out, second.is_fresh) == (first.left_out, True)
    assert not any(line.endswith("left out") for line in told)
    assert not tried(names, told, request=request).is_fresh


def test_without_a_process_nothing_is_left_out_and_nothing_is_kept(cache: Path):
    told: list[str] = []
    request = Request("cpu", torch.float32)
    means = Means((sys.executable, "-c", "raise SystemExit('no room')"), 60.0, lambda _units: 2)
    found = try_apart(request, told.append, means)
    assert (found.left_out, found.is_fresh) == ({}, False)
    assert (
        told[-1]
        == "kernels could not be tried in a process of their own: its process ended: no room"
    )
    assert not list(cache.iterdir())


def test_a_choice_is_rehearsed_to_its_end():
    """The real processes, with a model's shapes; also where the choice ends in an error."""
    arch = ModelArch.from_folder(embedded_model())
    told: list[str] = []
    found = try_apart(Request("cpu", torch.float32, arch=arch), told.append)
    assert (found.left_out, found.is_fresh) == ({}, True)
    refused = Request("cpu", torch.float32, {"experts": "gluon"})
    assert try_apart(refused, told.append).left_out == {}
    assert not try_apart(refused, told.append).is_fresh


def test_what_crashed_is_refused():
    request = Request("cpu", torch.float32)
    with pytest.raises(UnsupportedError, match=r"No backend of rope .* torch: crashed when"):
        resolve_here(request, {("rope", "torch"): "crashed when it was tried"}, print)
    attempts: list[tuple[str, str]] = []
    resolve_here(request, {}, print, lambda op, backend: attempts.append((op, backend)))
    assert ("rope", "torch") in attempts


def test_known_outcomes_of_canaries_are_not_repeated():
    attempts: list[tuple[str, str]] = []
    verdicts: dict[tuple[str, str], str | None] = {
        (name, backend): None for name, op in OPS.items() for backend in op.backends
    }
    request = Request("cpu", torch.float32)
    resolve_here(request, {}, print, lambda *pair: attempts.append(pair), verdicts)
    assert attempts == []
    verdicts["rope", "torch"] = "wrong numbers"
    with pytest.raises(UnsupportedError, match="torch: wrong numbers"):
        resolve_here(request, {}, print, verdicts=verdicts)


def test_on_a_cpu_nothing_is_tried_apart(monkeypatch: pytest.MonkeyPatch):
    """Plain torch alone runs there."""
    monkeypatch.setattr("tetrad.kernels.select.try_apart", None)
    resolve_ops("cpu")
    assert all("torch" in op.backends for op in OPS.values())


@pytest.mark.parametrize("name", ["no-op", "op/backend/more", "/backend"])
def test_kept_outcomes_that_name_no_backend_are_ignored(
    with_rope, cache: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    """Whoever edits the file must not keep servers from starting."""
    about = {"made": "up"}
    monkeypatch.setattr(trial, "_about", lambda _request: about)
    entry = {"about": about, "crashes": {name: "it crashed"}, "is_complete": True}
    path = cache / FILE_NAME
    path.write_text(json.dumps({"trials": {key_of(about): entry}}))
    told: list[str] = []
    with_rope("torch")
    assert tried("torch", told).left_out == {}
    assert "is not readable and is ignored" in told[0]


@pytest.mark.parametrize(
    ("forced", "called"),
    [
        ({}, ["a", "c"]),
        ({"mla": "b"}, ["b"]),
        ({"mla": "b", "mla.prefill": "c"}, ["b", "c"]),
        ({"mla.decode": "b"}, ["a", "b", "c"]),
        ({"experts": "torch"}, ["a", "c"]),
    ],
)
def test_what_a_choice_may_call_is_tried(forced: dict[str, str], called: list[str]):
    """Of attention, a backend may be asked for in one phase; "b" rounds on the way."""
    torch_backend = OPS["mla"].backends["torch"]
    rounds = Rounding("cuts corners", OPS["mla"].check.expected, {"float32": 0.0}, deviation=0.0)
    backends = {
        name: replace(torch_backend, name=name, rounding=rounds if name == "b" else None)
        for name in "abc"
    }
    op = replace(OPS["mla"], backends=backends)
    found = trial._Trial(Request("cpu", torch.float32, forced), print, trial.Means(), {})
    assert [backend.name for backend in found._wanted(op)] == called


@pytest.mark.gpu
def test_a_second_start_on_a_gpu_tries_and_times_nothing():
    """The first compiles side by side and times; both come to the same choice."""
    arch = ModelArch.from_folder(embedded_model())
    first_told: list[str] = []
    second_told: list[str] = []
    first = resolve_ops("cuda", dtype=torch.bfloat16, arch=arch, tell=first_told.append)
    second = resolve_ops("cuda", dtype=torch.bfloat16, arch=arch, tell=second_told.append)
    assert first_told[0].startswith("compiling and trying kernels: ")
    assert any(line.startswith("timing experts: ") for line in first_told)
    assert second_told == ["checking kernels in this process"]
    for before, after in zip(first.report, second.report, strict=True):
        assert (before["backend"], before["times_us"]) == (after["backend"], after["times_us"])
        assert "measured" not in after["reason"]
