"""`tetrad doctor` tells what is there, and works where much is missing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from tetrad.kernels.registry import OPS


def test_every_backend_is_reported_with_its_check(tetrad):
    code, out, _ = tetrad("doctor", "--device", "cpu", "--json")
    found = json.loads(out)
    assert code == (1 if found["machine"]["gpus"] and not torch.cuda.is_available() else 0)
    assert found["device"] == "cpu"
    listed = {(row["op"], row["backend"]) for row in found["backends"]}
    assert listed == {(name, backend) for name, op in OPS.items() for backend in op.backends}
    for name in OPS:
        (chosen,) = [r for r in found["backends"] if r["op"] == name and r["is_chosen"]]
        assert chosen["refusal"] is None
        assert chosen["reason"]
        assert chosen["check_ms"] > 0
    remarks = {
        row["backend"]: row["remarks"] for row in found["backends"] if row["op"] == "experts"
    }
    for backend in ("flashinfer_cutlass", "triton_fp4"):
        assert remarks[backend].startswith("not run on hardware; rounds activations to NVFP4")
    assert remarks["triton"] == ""
    assert found["machine"]["packages"]["torch"] == torch.__version__
    assert found["model"]["weight_bytes"] > 0


def test_tables_show_the_same(tetrad):
    _, out, _ = tetrad("doctor", "--device", "cpu")
    for word in ("Machine", "memory", "Backends on cpu, float32", "Embedded model: abacus", *OPS):
        assert word in out


def test_tables_say_each_thing_once(tetrad):
    """One row for each op, and each reason in one line."""
    _, out, _ = tetrad("doctor", "--device", "cpu")
    lines = out.splitlines()
    for name in OPS:
        assert sum(line.startswith(f"│ {name} ") for line in lines) == 1
    (refused,) = (line for line in lines if "needs an NVIDIA GPU" in line)
    assert refused.startswith("triton, cublas, gluon, ")
    assert out.count("rounds activations to NVFP4") == 1
    assert len(lines) < 50


def test_the_machine_is_told_before_anything_is_tried(tetrad, monkeypatch):
    """On a GPU the rest takes half a minute."""

    def ended(*_: object):
        raise KeyboardInterrupt

    monkeypatch.setattr("tetrad.cli.doctor._examine_device", ended)
    _, out, _ = tetrad("doctor", "--device", "cpu")
    assert "processor" in out
    assert "Backends" not in out


def test_a_reason_that_holds_for_some_ops_names_them(tetrad, monkeypatch):
    monkeypatch.setattr(
        "tetrad.kernels.canary.canary",
        lambda op, backend, dtype, place: (
            "wrong numbers" if op.contract.name in ("rope", "mla") else None
        ),
    )
    _, out, _ = tetrad("doctor", "--device", "cpu")
    assert "torch of rope and mla: wrong numbers" in out.splitlines()


def test_a_backend_with_wrong_numbers_is_a_problem(tetrad, monkeypatch):
    """The check is real: make one op wrong and doctor says so and fails."""
    monkeypatch.setattr(
        "tetrad.kernels.canary.canary",
        lambda op, backend, dtype, place: "wrong" if op.contract.name == "rope" else None,
    )
    code, out, _ = tetrad("doctor", "--device", "cpu", "--json")
    found = json.loads(out)
    assert code == 1
    assert any("No backend of rope can run" in problem for problem in found["problems"])
    rows = [row for row in found["backends"] if row["op"] == "rope"]
    assert not any(row["is_chosen"] for row in rows)
    assert "wrong" in [row["refusal"] for row in rows if row["backend"] == "torch"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_gpu_is_named(tetrad):
    code, out, _ = tetrad("doctor", "--device", "cuda")
    assert code == 1
    assert "PROBLEM: --device cuda: torch finds no CUDA device here." in out


def test_without_torch_it_still_tells_the_rest():
    script = (
        "import sys\nsys.modules['torch'] = None\nsys.argv = ['tetrad', 'doctor', '--json']\n"
        "from tetrad.cli.main import main\nsys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
    found = json.loads(done.stdout)
    assert "torch cannot be imported" in found["problems"][0]
    assert found["backends"] == []
    assert found["machine"]["memory_bytes"] > 0
    assert found["model"]["model_type"] == "glm_moe_dsa"
