"""Run by test_dense_triton.py, in a process where Triton interprets kernels on the CPU.

In fp32 alone: the interpreter rounds bf16 wrongly.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.linear import DrawnDense, draw_dense, relative_error
from tetrad.kernels.backend import Backend
from tetrad.kernels.canary import try_case
from tetrad.kernels.contract import Case
from tetrad.kernels.linear import triton_dense
from tetrad.kernels.linear.dense_tiles import DenseTile
from tetrad.kernels.linear.triton_dense import DenseLinear
from tetrad.kernels.registry import OPS

CPU = torch.device("cpu")
HOPPER = (9, 0)
DENSE_CASES = [
    pytest.param(op, case, id=f"{op}-{case.name}")
    for op in ("linear", "router")
    for case in OPS[op].contract.cases
    if case["format"] == "bf16"
]
NEW_EMPTY: Any = Tensor.new_empty


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read without having been written shows."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: HOPPER)
    monkeypatch.setattr(Tensor, "new_empty", _poisoned)


def _poisoned(like: Tensor, *shape: int, **options: Any) -> Tensor:
    made: Tensor = NEW_EMPTY(like, *shape, **options)
    return made.fill_(torch.nan) if made.is_floating_point() else made


@pytest.mark.parametrize("cores", [1, 132])
@pytest.mark.parametrize(("op", "case"), DENSE_CASES)
def test_case(op: str, case: Case, cores: int, monkeypatch: pytest.MonkeyPatch):
    """As on Hopper, whose table has a tile for it; fp32 in place of bf16."""
    monkeypatch.setattr(triton_dense, "cores_of", lambda _device: cores)
    backend = Backend(
        "triton",
        lambda x, weight: triton_dense.run(x, weight, torch.float32),
        prepare=lambda weight, _dtype: DenseLinear.of(weight.data.float()),
    )
    (result,) = try_case(OPS[op], backend, case, torch.float32, CPU)
    assert result.passes(OPS[op].contract.tolerance["float32"]), result


@pytest.mark.parametrize("splits", [1, 2, 3, 7])
@pytest.mark.parametrize(("num_tokens", "group"), [(1, 16), (40, 2)])
@pytest.mark.parametrize(("out", "width"), [(200, 640), (37, 212), (130, 52)])
def test_every_way_to_split(out: int, width: int, num_tokens: int, group: int, splits: int):
    """Ragged rows, columns that fill no step, parts without any column."""
    drawn = draw_dense(CPU, out, width, num_tokens)
    tile = DenseTile(64, 16, 64, stages=2, group=group)
    y = triton_dense.product(drawn.x, drawn.weight, tile, splits, torch.float32)
    assert relative_error(y, drawn.expected()) < 1e-6
    assert int(drawn.weight.arrived.count_nonzero()) == 0


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_row(poison: float):
    drawn = draw_dense(CPU, 100, 200, 5)
    tile = DenseTile(64, 16, 64, stages=2)
    before = triton_dense.product(drawn.x, drawn.weight, tile, 2, torch.float32)
    drawn.x[3, 150] = poison
    after = triton_dense.product(drawn.x, drawn.weight, tile, 2, torch.float32)
    assert not after[3].isfinite().any()
    others = [0, 1, 2, 4]
    assert torch.equal(after[others], before[others])


def test_what_the_copy_engine_cannot_read_goes_to_cublas(monkeypatch: pytest.MonkeyPatch):
    """Rows of an odd length, and rows of a view that begin between two of its places."""
    monkeypatch.setattr(triton_dense, "product", None)
    odd = draw_dense(CPU, 70, 129, 3)
    even = draw_dense(CPU, 70, 128, 3)
    shifted = torch.zeros(70 * 128 + 1)[1:].view(70, 128).copy_(even.weight.weight)
    for drawn in (odd, DrawnDense(even.x, DenseLinear(shifted, even.weight.arrived))):
        assert not triton_dense.can_be_copied(drawn.x, drawn.weight.weight)
        y = triton_dense.run(drawn.x, drawn.weight, torch.float32)
        assert relative_error(y, drawn.expected()) < 1e-6
