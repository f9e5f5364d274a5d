"""The small Triton kernels without a GPU: interpreted, compiled for four generations, refused."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.kernels.compile_helpers import CAPABILITIES, compile_launches, run_interpreted
from tests.kernels.glue import GLUE_OPS, fp8_latents, glm_case
from tetrad.core.hardware import DeviceSnapshot
from tetrad.kernels import triton_support
from tetrad.kernels.device import snapshot
from tetrad.kernels.registry import OPS

CPU = torch.device("cpu")
HOPPER = DeviceSnapshot("NVIDIA H200", "cuda", (9, 0), 1 << 37, 132)

STEPS = {"sort_tokens": (2, 200, 600), "head_linear": (2, 17, 33, 65), "absorb": (2, 17, 33, 65)}
"""Where steps of another size launch another kernel than two tokens do."""

needs_triton = pytest.mark.skipif(
    triton_support.triton is None, reason="Triton has wheels for Linux only"
)


@needs_triton
def test_every_case_interpreted():
    run_interpreted(Path(__file__).with_name("interpreted_glue.py"))


@needs_triton
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", GLUE_OPS)
def test_compiles_without_spilling(
    name: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """At GLM's sizes. An atomic add in global memory would make the order of sums vary."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    op = OPS[name]
    kernels = []
    cases = [glm_case(name, num_tokens) for num_tokens in STEPS.get(name, (2,))]
    cases += [fp8_latents(2)] if name == "latents" else []
    for case in cases:
        inputs = op.check.inputs(case, torch.bfloat16, CPU)
        call = partial(op.backends["triton"].run, **inputs)
        kernels += compile_launches(call, capability, tmp_path, monkeypatch)
    assert kernels
    for kernel in kernels:
        assert kernel.stack_bytes == 0, kernel.name
        assert kernel.shared_bytes <= 49 << 10, kernel.name
        assert not re.search(r"\b(atom|red)\.\S*global", kernel.ptx), kernel.name


@needs_triton
def test_a_kernel_compiles_once_for_all_step_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A step of another size must not wait for a compiler."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for name in GLUE_OPS:
        op = OPS[name]
        texts = set()
        for num_tokens in (1, 3, 16):
            inputs = op.check.inputs(glm_case(name, num_tokens), torch.bfloat16, CPU)
            call = partial(op.backends["triton"].run, **inputs)
            kernels = compile_launches(call, 90, tmp_path, monkeypatch)
            texts.add(tuple(kernel.ptx for kernel in kernels))
        assert len(texts) == 1, name


@pytest.mark.parametrize("name", GLUE_OPS)
def test_what_a_device_lacks_is_told(name: str, monkeypatch: pytest.MonkeyPatch):
    why_not = OPS[name].backends["triton"].why_not
    assert "use 'torch'" in str(why_not(snapshot("cpu")))
    assert "8.0 (Ampere) or later, this GPU has 7.5" in str(
        why_not(replace(HOPPER, compute_capability=(7, 5)))
    )
    monkeypatch.setattr(triton_support, "triton", None)
    assert 'pip install "triton' in str(why_not(HOPPER))


@needs_triton
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_generations_that_can_run_it(capability: int):
    device = replace(HOPPER, compute_capability=divmod(capability, 10))
    assert triton_support.why_not(device) is None


def test_everything_works_where_triton_is_not_installed():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from tetrad.kernels.select import resolve_ops\n"
        "print({row['backend'] for row in resolve_ops('cpu').report})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch" in done.stdout
    assert "triton" not in done.stdout
    assert "gluon" not in done.stdout


@pytest.mark.parametrize(("size", "power"), [(1, 1), (2, 2), (3, 4), (6144, 8192), (8192, 8192)])
def test_the_next_power_of_two(size: int, power: int):
    assert triton_support.next_power_of_2(size) == power


@pytest.mark.parametrize(
    ("columns", "warps"), [(1, 1), (512, 1), (2048, 4), (8192, 16), (1 << 20, 32)]
)
def test_warps_of_a_row(columns: int, warps: int):
    assert triton_support.row_warps(columns) == warps
