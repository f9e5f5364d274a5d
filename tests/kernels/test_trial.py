"""Backends that crash or hang, in a process that can be spared."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from tetrad.core.arch import ModelArch
from tetrad.core.errors import UnsupportedError
from tetrad.data import embedded_model
from tetrad.kernels import trial
from tetrad.kernels.choice_cache import FILE_NAME, key_of
from tetrad.kernels.registry import OPS
from tetrad.kernels.select import resolve_here, resolve_ops
from tetrad.kernels.trial import Request, crashes

CHILD = """
import os, signal, sys, time
from dataclasses import replace
from tetrad.kernels import registry, trial_child

rope = registry.OPS["rope"]
right = rope.backends["torch"]

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

print("a library says hello")
ways = {"killed": killed, "broken": broken, "hung": hung}
names = sys.argv[1].split(",")
backends = {name: replace(right, name=name, run=ways.get(name, right.run)) for name in names}
registry.OPS.clear()
registry.OPS["rope"] = replace(rope, backends=backends)
trial_child.main()
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TETRAD_CACHE_DIR", str(tmp_path))
    return tmp_path


def tried(names: str, told: list[str], patience_s: float = 60.0) -> dict[trial.Pair, str]:
    request = Request("cpu", torch.float32, scope="all")
    return crashes(request, told.append, (sys.executable, "-c", CHILD, names), patience_s)


def test_each_that_crashes_is_left_out_and_the_others_are_tried():
    told: list[str] = []
    found = tried("first,killed,second,broken,torch", told)
    assert found == {
        ("rope", "killed"): "crashed when it was tried: its process got SIGSEGV",
        ("rope", "broken"): "crashed when it was tried: its process ended: RuntimeError: CUDA "
        "error: an illegal memory access was encountered",
    }
    assert told[0] == "trying kernels in a process of their own"
    assert [sentence.split(" ")[2] for sentence in told[1:]] == ["killed", "broken"]


def test_one_that_hangs_is_ended():
    found = tried("torch,hung", [], patience_s=6.0)
    assert found == {("rope", "hung"): "crashed when it was tried: it did not come back within 6 s"}


def test_outcomes_are_kept(monkeypatch: pytest.MonkeyPatch):
    told: list[str] = []
    first = tried("killed,torch", told)
    count = len(told)
    monkeypatch.setattr(trial, "_run", None)
    assert tried("killed,torch", told) == first
    assert len(told) == count


def test_without_a_process_nothing_is_left_out_and_nothing_is_kept(cache: Path):
    told: list[str] = []
    request = Request("cpu", torch.float32)
    assert (
        crashes(request, told.append, (sys.executable, "-c", "raise SystemExit('no room')")) == {}
    )
    assert (
        told[-1]
        == "kernels could not be tried in a process of their own: its process ended: no room"
    )
    assert not list(cache.iterdir())


def test_a_choice_is_rehearsed_to_its_end():
    """The real process, with a model's shapes; also where the choice ends in an error."""
    arch = ModelArch.from_folder(embedded_model())
    assert crashes(Request("cpu", torch.float32, arch=arch), lambda _sentence: None) == {}
    refused = Request("cpu", torch.float32, {"experts": "gluon"})
    assert crashes(refused, lambda _sentence: None) == {}


def test_what_crashed_is_refused():
    request = Request("cpu", torch.float32)
    with pytest.raises(UnsupportedError, match=r"No backend of rope .* torch: crashed when"):
        resolve_here(request, {("rope", "torch"): "crashed when it was tried"}, print)
    attempts: list[tuple[str, str]] = []
    resolve_here(request, {}, print, lambda op, backend: attempts.append((op, backend)))
    assert ("rope", "torch") in attempts


def test_on_a_cpu_nothing_is_tried_apart(monkeypatch: pytest.MonkeyPatch):
    """Plain torch alone runs there."""
    monkeypatch.setattr("tetrad.kernels.select.crashes", None)
    resolve_ops("cpu")
    assert all("torch" in op.backends for op in OPS.values())


@pytest.mark.parametrize("name", ["no-op", "op/backend/more", "/backend"])
def test_kept_outcomes_that_name_no_backend_are_ignored(
    cache: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    """Whoever edits the file must not keep servers from starting."""
    about = {"made": "up"}
    monkeypatch.setattr(trial, "_about", lambda _request: about)
    entry = {"about": about, "crashes": {name: "it crashed"}}
    path = cache / FILE_NAME
    path.write_text(json.dumps({"trials": {key_of(about): entry}}))
    told: list[str] = []
    command = (sys.executable, "-c", "print('{\"done\": true}')")
    assert crashes(Request("cpu", torch.float32), told.append, command) == {}
    assert "is not readable and is ignored" in told[0]
