"""Run by test_kernels_stream.py, in a process where Triton interprets kernels on the CPU."""

from __future__ import annotations

import pytest
import torch

from tetrad.bench.kernels import stream as kernels_stream
from tetrad.bench.kernels.stream import SPAN, STEPS, read_kernel, streams
from tetrad.kernels import triton_support


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_support, "why_not", lambda _device: None)


def test_every_number_is_copied_and_none_behind():
    size = 3 * SPAN * STEPS
    source = torch.randn(size)
    target = torch.full((size + 5,), torch.nan)
    copy, _ = streams(source, target)
    copy()
    assert torch.equal(target[:size], source)
    assert target[size:].isnan().all()


def test_every_number_is_read():
    source = torch.randn(2 * SPAN * STEPS)
    partial = torch.full((3,), torch.nan)
    read_kernel[(2,)](source, partial, SPAN, STEPS)
    expected = source.view(2, -1).double().sum(1)
    torch.testing.assert_close(partial[:2].double(), expected, rtol=1e-4, atol=1e-3)
    assert partial[2].isnan()
    assert kernels_stream.whole(len(source) + 7) == len(source)
