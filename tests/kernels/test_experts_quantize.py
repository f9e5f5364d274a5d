"""Rows of activations in NVFP4: interpreted, compiled for GPUs that are not there, and run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.kernels.compile_helpers import INTERPRETED_S, compile_launches, run_interpreted
from tests.kernels.rows import difficult_rows, reference_rows
from tetrad.kernels.experts.triton_quantize import quantize_rows

pytest.importorskip("triton")


@pytest.mark.timeout(INTERPRETED_S)
def test_interpreted():
    run_interpreted(Path(__file__).with_name("interpreted_quantize.py"))


@pytest.mark.parametrize("capability", [90, 100, 103, 120])
@pytest.mark.parametrize("width", [2048, 6144])
def test_compiled(capability: int, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """bfloat16 rows; the scales are converted by the instruction for it."""
    x = torch.zeros(4, width, dtype=torch.bfloat16)
    rows = torch.zeros(4, dtype=torch.int32)

    def launch() -> None:
        quantize_rows(x)
        quantize_rows(x, rows=rows)

    for kernel in compile_launches(launch, capability, tmp_path, monkeypatch):
        assert "cvt.rn.satfinite.e4m3x2.f32" in kernel.ptx
        assert kernel.stack_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("width", [48, 2048, 6144])
def test_on_a_gpu(width: int):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the GPU has no E4M3")
    x = difficult_rows(64, width).bfloat16()
    ours, theirs = quantize_rows(x.cuda()), reference_rows(x)
    assert torch.equal(ours.row_scale.cpu(), theirs.row_scale)
    assert torch.equal(ours.scales.cpu().view(torch.uint8), theirs.scales.view(torch.uint8))
    assert torch.equal(ours.codes.cpu(), theirs.codes)
