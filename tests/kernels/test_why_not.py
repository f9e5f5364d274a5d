"""What every backend says of every generation of GPU: one table for the whole registry."""

from __future__ import annotations

import re

import pytest
import torch

from tests.house.source import ROOT
from tetrad.core.hardware import DeviceSnapshot
from tetrad.kernels import triton_support
from tetrad.kernels.registry import OPS

CPU = None
TURING, AMPERE, ADA, HOPPER = (7, 5), (8, 0), (8, 9), (9, 0)
BLACKWELL, BLACKWELL_ULTRA, WORKSTATION, SPARK = (10, 0), (10, 3), (12, 0), (12, 1)
EVERYWHERE = (CPU, TURING, AMPERE, ADA, HOPPER, BLACKWELL, BLACKWELL_ULTRA, WORKSTATION, SPARK)
FROM_AMPERE = EVERYWHERE[2:]

RUNS_ON = {
    "torch": EVERYWHERE,
    "triton": FROM_AMPERE,
    "gluon": (HOPPER,),
    "humming": FROM_AMPERE,
    "cublas": EVERYWHERE[1:],
    "flashinfer_trtllm": (BLACKWELL, BLACKWELL_ULTRA),
    "flashinfer_cutedsl": (BLACKWELL, BLACKWELL_ULTRA),
    "flashinfer_cutlass": (BLACKWELL, BLACKWELL_ULTRA, WORKSTATION, SPARK),
    "triton_fp4": (BLACKWELL, BLACKWELL_ULTRA, WORKSTATION, SPARK),
    "flashinfer_sparse_mla": (WORKSTATION, SPARK),
    "sdpa": EVERYWHERE,
    "layer_norm": (CPU,),
    "onednn": (CPU,),
    "candidates": (CPU,),
    "total": (CPU,),
}
"""With every optional package installed."""
WITH_TRITON = {("absorb", "cublas")}
"""Backends of which Triton runs a part."""

CASES = [
    pytest.param(op, backend, capability, id=f"{op}-{backend}-{capability}")
    for op in OPS
    for backend in OPS[op].backends
    for capability in EVERYWHERE
]


def device(capability: tuple[int, int] | None) -> DeviceSnapshot:
    return DeviceSnapshot("device", "cuda" if capability else "cpu", capability, 1 << 36, 100)


@pytest.mark.parametrize(("op", "backend", "capability"), CASES)
def test_the_table(
    op: str, backend: str, capability: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(triton_support, "triton", object())
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr("tetrad.kernels.experts.gluon.gluon", object())
    monkeypatch.setattr("tetrad.kernels.experts.triton_fp4._triton_version", lambda: (3, 9))
    sentence = OPS[op].backends[backend].why_not(device(capability))
    runs_on = RUNS_ON["triton" if (op, backend) in WITH_TRITON else backend]
    assert (sentence is None) == (capability in runs_on)


def test_the_page_on_kernels_knows_every_backend():
    table = (ROOT / "docs" / "kernels.md").read_text().split("## Backends")[1]
    rows = [line for line in table.split("\n\n")[2].splitlines() if line.startswith("| `")]
    told = {name for row in rows for name in re.findall(r"`([a-z0-9_]+)`", row.split("|")[1])}
    assert told == {name for op in OPS.values() for name in op.backends}


def test_the_documented_table():
    """docs/kernels.md has one line a backend of the experts, and a column for each GPU."""
    text = (ROOT / "docs" / "kernels.md").read_text()
    (table,) = re.findall(r"\| backend \| 8\.0 .*?\n\n", text, re.DOTALL)
    head, _, *rows = table.splitlines()[:-1]
    columns = [tuple(map(int, name.split("."))) for name in re.findall(r"\d+\.\d", head)]
    assert [capability for capability in columns if capability not in EVERYWHERE] == []
    said = {row.split("`")[1]: re.findall(r"yes|no", row.split("`")[2]) for row in rows}
    assert list(said) == list(OPS["experts"].backends)
    for backend, cells in said.items():
        runs = ["yes" if capability in RUNS_ON[backend] else "no" for capability in columns]
        assert cells == runs, backend


@pytest.mark.parametrize("op", OPS)
def test_a_refusal_says_what_would_cure_it(op: str, monkeypatch: pytest.MonkeyPatch):
    """Nothing is installed: each sentence names a package to install or another backend."""
    monkeypatch.setattr(triton_support, "triton", None)
    for name, backend in OPS[op].backends.items():
        if CPU in RUNS_ON[name]:
            continue
        assert "use 'torch'" in str(backend.why_not(device(CPU)))
        if name != "cublas":  # comes with torch
            assert "pip install" in str(backend.why_not(device(HOPPER)))
