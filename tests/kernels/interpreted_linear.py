"""Run by test_linear_triton.py, in a process where Triton interprets kernels on the CPU.

In fp32 alone: the interpreter rounds bf16 wrongly.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.linear import draw_linear, relative_error
from tetrad.formats.weights import Fp8BlockWeight
from tetrad.kernels.canary import try_case
from tetrad.kernels.contract import Case
from tetrad.kernels.linear import triton as linear_triton
from tetrad.kernels.linear.packed import pack
from tetrad.kernels.linear.tiles import LinearTile, fitted
from tetrad.kernels.registry import OPS

CPU = torch.device("cpu")
AMPERE = (8, 0)
LINEAR = OPS["linear"]
NEW_EMPTY: Any = Tensor.new_empty


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read without having been written shows."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: AMPERE)
    monkeypatch.setattr(Tensor, "new_empty", _poisoned)


def _poisoned(like: Tensor, *shape: int, **options: Any) -> Tensor:
    made: Tensor = NEW_EMPTY(like, *shape, **options)
    return made.fill_(torch.nan) if made.is_floating_point() else made


@pytest.mark.parametrize("case", LINEAR.contract.cases, ids=lambda case: case.name)
@pytest.mark.parametrize("cores", [1, 132])
def test_case(case: Case, cores: int, monkeypatch: pytest.MonkeyPatch):
    """Packed as for bf16, multiplied with fp32 rows."""
    monkeypatch.setattr(linear_triton, "cores_of", lambda _device: cores)
    triton = LINEAR.backends["triton"]
    packing = type(triton)("triton", triton.run, prepare=_prepare_for_bf16)
    (result,) = try_case(LINEAR, packing, case, torch.float32, CPU)
    assert result.passes(LINEAR.contract.tolerance["float32"]), result


def _prepare_for_bf16(weight: Any, dtype: torch.dtype) -> Any:
    is_packed = weight.format_name.startswith(("nvfp4", "fp8"))
    return LINEAR.backends["triton"].prepare(weight, torch.bfloat16 if is_packed else dtype)


@pytest.mark.parametrize(("columns", "splits"), [(64, 2), (64, 10), (128, 1), (128, 5)])
@pytest.mark.parametrize("format_name", ["nvfp4", "fp8_block"])
@pytest.mark.parametrize(("num_tokens", "group"), [(1, 16), (40, 2)])
def test_every_way_to_split(
    format_name: str, columns: int, splits: int, num_tokens: int, group: int
):
    """640 columns less one block; ragged rows; token tiles that fill their groups in part."""
    drawn = draw_linear(CPU, format_name, 200, 640 - 16, num_tokens)
    tile = LinearTile(16, columns, stages=2, group=group)
    tile = fitted(tile, drawn.packed.packed_width, AMPERE, drawn.packed.bits)
    y = linear_triton.product(drawn.x, drawn.packed, tile, splits, AMPERE)
    assert relative_error(y, drawn.expected()) < 1e-6
    assert int(drawn.packed.arrived.count_nonzero()) == 0


def test_a_nan_among_fp8_codes_shows_in_the_rows_of_its_block():
    drawn = draw_linear(CPU, "fp8_block", 200, 300, 2)
    assert isinstance(drawn.weight, Fp8BlockWeight)
    drawn.weight.data.view(torch.uint8)[130, 140] = 0x7F
    packed = pack(drawn.weight)
    tile = LinearTile(16, 64, stages=2)
    y = linear_triton.product(drawn.x, packed, tile, 1, AMPERE)
    assert y[:, :128].isfinite().all()
    assert y[:, 128:].isnan().all()
