"""Large dense products, and the plateau that others are compared with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.bench.test_kernels import ARCH, CPU, FixedTimer, plan, rows, with_backend
from tetrad.bench.kernels import run as kernels
from tetrad.bench.kernels.dense import DENSE, Operands, dense_cases
from tetrad.core.hardware import DeviceSnapshot
from tetrad.core.presets import preset
from tetrad.core.records import CallTime, Ceilings
from tetrad.kernels.contract import Case
from tetrad.kernels.device import snapshot
from tetrad.kernels.registry import OPS


def gpu(*capability: int) -> DeviceSnapshot:
    return DeviceSnapshot("GPU", "cuda", (capability[0], capability[1]), 1 << 36, 100)


def formats(here: DeviceSnapshot) -> list[str]:
    cases = dense_cases(preset("glm-5"), torch.bfloat16, here)
    return list(dict.fromkeys(case["format"] for case in cases))


def test_each_generation_has_its_formats():
    assert formats(gpu(8, 0)) == ["bfloat16"]
    assert formats(gpu(8, 9)) == formats(gpu(9, 0)) == ["bfloat16", "fp8"]
    assert formats(gpu(10, 0)) == ["bfloat16", "fp8", "fp4"]


def test_products_have_the_models_widths():
    cases = dense_cases(preset("glm-5"), torch.bfloat16, gpu(9, 0))
    assert {(case["out"], case["width"]) for case in cases} == {
        (4096, 6144), (6144, 2048), (6144, 16384),
    }  # fmt: skip
    assert {case["T"] for case in cases} == {1024, 4096, 8192}


@pytest.mark.parametrize("stored", ["float32", "fp8", "fp4"])
def test_the_check_sees_a_wrong_number(stored: str):
    """The values of a format are those that its codes stand for."""
    case = Case("c", {"T": 40, "out": 96, "width": 64, "format": stored}, is_large=True)
    operands: Operands = DENSE.check.inputs(case, torch.float32, CPU)["operands"]
    (truth,) = DENSE.check.expected({"operands": operands})
    x, weight = operands.values(operands.x), operands.values(operands.weight)
    assert x.shape == (40, 64)
    result = x @ weight.T
    (cut,) = DENSE.check.outputs(result)
    torch.testing.assert_close(cut, truth)
    result[-1, -1] += 1.0
    assert not torch.allclose(DENSE.check.outputs(result)[0], truth)
    assert (operands.nbytes == (40 + 96) * 64 // 2) == (stored == "fp4")


class Decreasing(FixedTimer):
    """Each cell takes longer than the last."""

    def time(self, calls: Any, budget_s: float) -> CallTime:
        self.us *= 2
        return super().time(calls, budget_s)


def test_the_best_dense_product_is_the_plateau(monkeypatch: pytest.MonkeyPatch):
    """Whatever backends are asked for, and whatever other formats reach."""
    ceilings = Ceilings(copy_tb_per_s=1.0, read_tb_per_s=1.0, gemm_tflops=1e9, launch_us=1.0)
    monkeypatch.setattr(kernels, "measure_ceilings", lambda *_: ceilings)
    found = rows(plan("dense", "linear", "rms_norm"), Decreasing())
    dense = [row for row in found if row.op == "dense"]
    assert len(dense) == len(dense_cases(ARCH, torch.float32, snapshot("cpu")))
    best = max(row.tflops for row in dense if row.tflops)
    for row in found:
        if row.op == "linear":
            assert row.plateau_tflops == best
            assert row.tflops is not None
            assert row.plateau_share == pytest.approx(row.tflops / best)
        if row.op == "rms_norm":
            assert (row.plateau_tflops, row.plateau_share) == (None, None)


def test_without_dense_products_the_ceiling_is_the_plateau(monkeypatch: pytest.MonkeyPatch):
    ceilings = Ceilings(copy_tb_per_s=1.0, read_tb_per_s=1.0, gemm_tflops=0.5, launch_us=1.0)
    monkeypatch.setattr(kernels, "measure_ceilings", lambda *_: ceilings)
    assert {row.plateau_tflops for row in rows(plan("linear"))} == {0.5}


def test_humming_runs_first_and_the_others_are_compared(monkeypatch: pytest.MonkeyPatch):
    experts = OPS["experts"]
    stand_in = with_backend(experts, "quick", experts.backends["torch"].run)
    humming = replace(experts.backends["torch"], name="humming")
    stand_in = replace(stand_in, backends={**stand_in.backends, "humming": humming})
    monkeypatch.setitem(OPS, "experts", stand_in)
    found = rows(plan("experts", backends=("quick", "torch"), compare=True), Decreasing())
    assert [row.backend for row in found] == ["humming", "quick", "torch"]
    assert [row.over_humming for row in found] == [None, 2.0, 4.0]
    assert [row.backend for row in rows(plan("experts", backends=("quick",)))] == ["quick"]


def test_where_humming_cannot_run_its_row_says_so():
    found = rows(plan("experts", compare=True))
    assert [(row.backend, row.status) for row in found] == [("humming", "refused"), ("torch", "ok")]
    assert found[1].over_humming is None


@pytest.mark.gpu
def test_dense_products_on_a_gpu():
    changes: dict[str, Any] = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    found = list(kernels.run(plan("dense", **changes), lambda _: None))
    assert {row.status for row in found} == {"ok"}, [row.detail for row in found]
