"""What every backend says of every generation of GPU: one table for the whole registry."""

from __future__ import annotations

import pytest

from tetrad.core.hardware import DeviceSnapshot
from tetrad.kernels import triton_support
from tetrad.kernels.registry import OPS

CPU = None
TURING, AMPERE, ADA, HOPPER = (7, 5), (8, 0), (8, 9), (9, 0)
BLACKWELL, BLACKWELL_ULTRA, WORKSTATION = (10, 0), (10, 3), (12, 0)
EVERYWHERE = (CPU, TURING, AMPERE, ADA, HOPPER, BLACKWELL, BLACKWELL_ULTRA, WORKSTATION)
FROM_AMPERE = EVERYWHERE[2:]

RUNS_ON = {
    "torch": EVERYWHERE,
    "triton": FROM_AMPERE,
    "gluon": (HOPPER,),
    "humming": FROM_AMPERE,
    "cublas": EVERYWHERE[1:],
}
"""With every optional package installed."""

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
    monkeypatch.setattr("tetrad.kernels.experts.gluon.gluon", object())
    sentence = OPS[op].backends[backend].why_not(device(capability))
    assert (sentence is None) == (capability in RUNS_ON[backend])


@pytest.mark.parametrize("op", OPS)
def test_a_refusal_says_what_would_cure_it(op: str, monkeypatch: pytest.MonkeyPatch):
    """Nothing is installed: each sentence names a package to install or another backend."""
    monkeypatch.setattr(triton_support, "triton", None)
    for name, backend in OPS[op].backends.items():
        if name == "torch":
            continue
        assert "use 'torch'" in str(backend.why_not(device(CPU)))
        if name != "cublas":  # comes with torch
            assert "pip install" in str(backend.why_not(device(HOPPER)))
