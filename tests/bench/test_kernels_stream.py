"""The kernels that measure a device's bandwidth, without a GPU and on one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.kernels.compile_helpers import CAPABILITIES, compile_launches, run_interpreted
from tetrad.bench.kernels.ceilings import measure_ceilings
from tetrad.bench.kernels.stream import SPAN, STEPS, streams, whole
from tetrad.kernels import triton_support
from tetrad.kernels.timer import CudaTimer

needs_triton = pytest.mark.skipif(
    triton_support.triton is None, reason="Triton has wheels for Linux only"
)


@needs_triton
def test_interpreted():
    run_interpreted(Path(__file__).with_name("interpreted_stream.py"))


@needs_triton
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_load_is_16_bytes_wide(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton_support, "why_not", lambda _device: None)
    source = torch.ones(2 * SPAN * STEPS)
    for call in streams(source, torch.empty_like(source)):
        (kernel,) = compile_launches(call, capability, tmp_path, monkeypatch)
        assert kernel.ptx.count("ld.global.v4") == SPAN * STEPS // 4 // 256
        assert kernel.stack_bytes == 0


def test_without_a_gpu_torch_streams():
    source = torch.arange(1000.0)
    target = torch.empty_like(source)
    copy, read = streams(source, target)
    copy()
    read()
    assert torch.equal(target, -source)
    assert whole(3 * SPAN * STEPS + 1) == 3 * SPAN * STEPS


@pytest.mark.gpu
@pytest.mark.alone
def test_ceilings_on_a_gpu():
    """Copying may not look much slower than reading: `copy_` in a graph did."""
    place = torch.device("cuda")
    found = measure_ceilings(CudaTimer(place), torch.bfloat16, place, 2.0)
    assert found.read_tb_per_s > 0.5
    assert found.copy_tb_per_s > 0.75 * found.read_tb_per_s
