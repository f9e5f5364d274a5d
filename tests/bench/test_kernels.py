"""The kernel timer's parts: cells of a model, checks that can fail, ceilings, records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.factories import TINY_GLM
from tetrad.bench.kernels import run as kernels
from tetrad.bench.kernels.breakdown import RUNS, launch_times, one_by_one
from tetrad.bench.kernels.ceilings import CPU_BYTES, CPU_EDGES, measure_ceilings
from tetrad.bench.kernels.check import truth_of
from tetrad.bench.kernels.run import KernelBench, run, worst
from tetrad.core.arch import ModelArch
from tetrad.core.ranks import Ranks
from tetrad.core.records import CallTime, Ceilings, KernelTiming
from tetrad.kernels.backend import Backend, Op
from tetrad.kernels.registry import OPS
from tetrad.kernels.shapes import Load, cases_for

CPU = torch.device("cpu")
ARCH = ModelArch.from_config(TINY_GLM)
LATENT_OPS = [op for name, op in OPS.items() if cases_for(name, ARCH, Ranks(), Load(14))]
"""Those that a model with latent attention has."""


class FixedTimer:
    """Runs each call once and says that it took `us`."""

    def __init__(self, us: float = 100.0, cache_bytes: int = 0) -> None:
        self.us = us
        self.cache_bytes = cache_bytes
        self.num_calls: list[int] = []

    def time(self, calls: Sequence[Callable[[], object]], budget_s: float) -> CallTime:
        for call in calls:
            call()
        self.num_calls.append(len(calls))
        return CallTime.of([self.us], "wall")


def plan(*ops: str, tokens: tuple[int, ...] = (3,), **changes: Any) -> KernelBench:
    loads = tuple(Load(n, context=100) for n in tokens)
    values: dict[str, Any] = {
        "ops": ops, "backends": ("torch",), "arch": ARCH, "model": "tiny", "ranks": Ranks(),
        "loads": loads, "expert_loads": loads, "dtype": torch.float32, "device": CPU,
        "budget_s": 60.0, "command": "tetrad bench kernels",
    }  # fmt: skip
    return KernelBench(**(values | changes))


def rows(plan: KernelBench, timer: FixedTimer | None = None) -> list[KernelTiming]:
    return list(run(plan, lambda _: None, timer or FixedTimer()))


def with_backend(op: Op, name: str, run: Callable[..., Any]) -> Op:
    made = replace(op.backends["torch"], name=name, run=run)
    return replace(op, backends={name: made, **op.backends})


def test_every_op_is_timed_and_right_at_a_models_shapes():
    found = rows(plan(*OPS))
    assert {row.op for row in found} == set(OPS)
    assert [row for row in found if row.status != "ok"] == []
    for row in found:
        assert row.error is not None
        assert row.error <= row.tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("op", LATENT_OPS, ids=lambda op: op.contract.name)
def test_a_cell_notices_a_wrong_last_row(op: Op, dtype: torch.dtype):
    """Fourteen tokens: enough that not every row is checked in float64."""
    case = cases_for(op.contract.name, ARCH, Ranks(), Load(14, context=100))[0]
    arguments = op.check.inputs(case, dtype, CPU)
    truth = truth_of(op, arguments)
    prepared = dict(arguments)
    if name := op.contract.prepared:
        prepared[name] = op.backends["torch"].prepare(arguments[name], dtype)
    raw = op.backends["torch"].run(**prepared)
    results = op.check.outputs(raw)
    assert truth.error(results) <= op.contract.tolerance[str(dtype).removeprefix("torch.")]
    flat = results[0].flatten(end_dim=-2) if results[0].ndim > 1 else results[0]
    flat[-1] = flat[-1].nan_to_num(neginf=0.0) * 3 + 5
    assert not truth.error(results) <= 0.01
    if flat.is_floating_point():
        flat[-1] = torch.nan
        assert not truth.error(results) <= 1e9


def test_rows_outside_the_sample_are_compared_with_the_reference():
    op = OPS["rms_norm"]
    arguments = op.check.inputs(
        cases_for("rms_norm", ARCH, Ranks(), Load(500))[0], torch.float32, CPU
    )
    truth = truth_of(op, arguments)
    assert truth.rows is not None
    assert truth.rows.tolist()[:: len(truth.rows) - 1] == [0, 499]
    unchecked = next(row for row in range(500) if row not in truth.rows.tolist())
    (result,) = op.check.outputs(op.backends["torch"].run(**arguments))
    assert truth.error((result,)) < 1e-6
    result[unchecked, 5] += 1.0
    assert truth.error((result,)) > 1e-3


def test_only_what_the_checked_rows_need_is_computed_in_float64(monkeypatch: pytest.MonkeyPatch):
    """Two slots a row, at most eight of them: four rows and no more than eight experts."""
    op, seen = OPS["experts"], {}
    case = cases_for("experts", ARCH, Ranks(), Load(40))[0]
    arguments = op.check.inputs(case, torch.float32, CPU)
    arguments["ids"] = arguments["ids"] % 3

    def expected(inputs: dict[str, Any]) -> Any:
        seen.update(inputs)
        return OPS["experts"].check.expected(inputs)

    truth_of(replace(op, check=replace(op.check, expected=expected)), arguments)
    assert seen["x"].shape[0] == 4
    assert seen["weight"].num_experts == 3
    assert seen["ids"].max() == 2


def test_wide_matrices_are_checked_at_both_ends():
    op = OPS["linear"]
    for stored in ("bf16", "nvfp4", "fp8_tensor", "fp8_block"):
        case = replace(
            op.contract.cases[0], values={"T": 3, "out": 600, "width": 64, "format": stored}
        )
        arguments = op.check.inputs(case, torch.float32, CPU)
        truth = truth_of(op, arguments)
        assert truth.exact[0].shape == (3, 256)
        (result,) = (op.backends["torch"].run(**arguments),)
        assert truth.error((result,)) < 2e-6
        result[:, 511] += 1.0
        narrow = replace(truth, whole=None)
        assert narrow.error((result,)) > 1e-3


def test_a_wrong_backend_gets_no_time(monkeypatch: pytest.MonkeyPatch):
    op = with_backend(OPS["rms_norm"], "off", lambda x, weight, eps: x * 1.001)
    monkeypatch.setitem(OPS, "rms_norm", op)
    found = rows(plan("rms_norm", backends=("off", "torch")))
    off, torch_row = found[0], found[1]
    assert (off.status, off.time, off.tflops, off.share) == ("wrong", None, None, None)
    assert off.error is not None
    assert off.error > 0.01
    assert torch_row.status == "ok"
    assert "first rms_norm by off at 3 tokens: relative error" in worst(found)
    assert worst([torch_row]) == ""


def test_a_row_that_nobody_wrote_shows(monkeypatch: pytest.MonkeyPatch):
    """The first run's memory is poisoned: what the second leaves as it was is NaN."""
    kept: list[torch.Tensor] = []

    def lazy(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        full = OPS["rms_norm"].backends["torch"].run(x, weight, eps)
        if not kept:
            kept.append(full)
        kept[0][:-1] = full[:-1]
        return kept[0]

    op = with_backend(OPS["rms_norm"], "lazy", lazy)
    monkeypatch.setitem(OPS, "rms_norm", op)
    row = rows(plan("rms_norm", backends=("lazy",)))[0]
    assert (row.status, row.error) == ("wrong", None)
    assert "not finite" in row.detail


def test_a_backend_that_fails_and_one_that_refuses_have_rows(monkeypatch: pytest.MonkeyPatch):
    def broken(**_: Any) -> None:
        raise RuntimeError("no such instruction\nsecond line")

    op = with_backend(OPS["rms_norm"], "broken", broken)
    shy = Backend("shy", broken, lambda _device: "needs four legs")
    op = replace(op, backends={"shy": shy, **op.backends})
    monkeypatch.setitem(OPS, "rms_norm", op)
    found = {row.backend: row for row in rows(plan("rms_norm", backends=()))}
    assert (found["shy"].status, found["shy"].detail) == ("refused", "needs four legs")
    assert found["broken"].status == "failed"
    assert found["broken"].detail == "RuntimeError: no such instruction"
    assert found["torch"].status == "ok"
    assert "broken" in worst(found.values())
    assert "rms_norm by shy: needs four legs" in worst([found["shy"]])
    assert worst([found["shy"], found["torch"]]) == ""


def test_inputs_that_cannot_be_made_fail_their_cell_only(monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("too large")

    op = OPS["rope"]
    monkeypatch.setitem(OPS, "rope", replace(op, check=replace(op.check, inputs=full)))
    found = rows(plan("rope", "activation"))
    assert [row.status for row in found] == ["failed", "ok", "ok"]
    assert "making the inputs: OutOfMemoryError: too large" in found[0].detail


def test_figures_follow_from_time_cost_and_ceilings(monkeypatch: pytest.MonkeyPatch):
    ceilings = Ceilings(copy_tb_per_s=2e-6, read_tb_per_s=1e-6, gemm_tflops=1e-4, launch_us=1.0)
    monkeypatch.setattr(kernels, "measure_ceilings", lambda *_: ceilings)
    (row, *_rest) = rows(plan("linear"), FixedTimer(us=1e6))
    assert row.flops == OPS["linear"].contract.flops(plan("linear").cells[0].case)
    assert row.tflops == pytest.approx(row.flops / 1e12)
    assert row.tb_per_s == pytest.approx(row.bytes / 1e12)
    assert row.bound == "memory"
    assert row.share == pytest.approx(row.bytes / 2e6)
    floor_us, bound = ceilings.floor_us(flops=1e9, num_bytes=1.0)
    assert floor_us == pytest.approx(1e7)
    assert bound == "compute"


def test_what_a_backend_issued_is_recorded(monkeypatch: pytest.MonkeyPatch):
    """It is asked with the arguments of the timed call."""
    padded = replace(
        OPS["linear"].backends["torch"],
        issued_flops=lambda a: 2.0 * 16 * a["weight"].shape[0] * a["weight"].shape[1],
    )
    monkeypatch.setitem(OPS, "linear", replace(OPS["linear"], backends={"torch": padded}))
    row = rows(plan("linear"))[0]
    assert row.issued_flops == pytest.approx(row.flops * 16 / 3)
    assert rows(plan("rms_norm"))[0].issued_flops is None


def test_small_inputs_come_in_several_sets():
    timer = FixedTimer(cache_bytes=1 << 30)
    rows(plan("rms_norm"), timer)
    assert timer.num_calls[-1] == kernels.MOST_SETS
    timer = FixedTimer(cache_bytes=0)
    rows(plan("rms_norm"), timer)
    assert timer.num_calls[-1] == 1


def test_what_does_not_fit_the_budget_is_skipped_not_lost(monkeypatch: pytest.MonkeyPatch):
    found = rows(plan("rms_norm", budget_s=1e-9))
    assert [row.status for row in found] == ["skipped"]
    assert "--budget-s" in found[0].detail
    assert worst(found) == ""


def test_a_cell_that_would_take_longer_than_is_left_is_not_begun(monkeypatch: pytest.MonkeyPatch):
    """As the one before it of the same op did."""
    now_s = [100.0]

    class SlowTimer(FixedTimer):
        def time(self, calls: Sequence[Callable[[], object]], budget_s: float) -> CallTime:
            if "experts" in getattr(getattr(calls[0], "func", None), "__module__", ""):
                now_s[0] += 2.0
            return super().time(calls, budget_s)

    monkeypatch.setattr(kernels, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    timer = SlowTimer()
    found = rows(plan("experts", "rope", tokens=(1, 2, 3), budget_s=3.5), timer)
    status = [(row.op, row.status) for row in found]
    assert status.count(("experts", "ok")) == 1
    assert status.count(("experts", "skipped")) == 2
    assert ("rope", "ok") in status


def test_an_op_that_changes_its_argument_is_given_a_fresh_one_each_time():
    found = rows(plan("latents", backends=()))
    assert [r.status for r in found if r.backend == "torch"] == ["ok"] * 2


def test_a_record_survives_json():
    for row in rows(plan("experts", "mla", expert_loads=(Load(0, "uniform", 100, 2),))):
        assert KernelTiming.model_validate_json(row.model_dump_json()).model_dump_json() == (
            row.model_dump_json()
        )
        assert row.command == "tetrad bench kernels"
        assert row.device["versions"]["torch"] == torch.__version__


def test_ceilings_count_bytes_and_operations():
    found = measure_ceilings(FixedTimer(us=1000.0), torch.float32, CPU, 1.0)
    assert found.copy_tb_per_s == pytest.approx(2 * CPU_BYTES / 1e9)
    assert found.read_tb_per_s == pytest.approx(CPU_BYTES / 1e9)
    assert found.gemm_tflops == pytest.approx(2 * max(CPU_EDGES) ** 3 / 1e9)
    assert found.launch_us == 1000.0
    assert found.tb_per_s == found.copy_tb_per_s


def test_a_busy_cpu_lowers_no_ceiling():
    """A ceiling of repeats that had lost the core to others showed shares of 200 %."""

    class Busy(FixedTimer):
        def time(self, calls: Sequence[Callable[[], object]], budget_s: float) -> CallTime:
            return CallTime.of([100.0, 4100.0, 4200.0], "wall")

    found = measure_ceilings(Busy(), torch.float32, CPU, 1.0)
    assert found.read_tb_per_s == pytest.approx(CPU_BYTES / 1e8)
    assert found.gemm_tflops == pytest.approx(2 * max(CPU_EDGES) ** 3 / 1e8)
    assert found.launch_us == 4100.0


def test_a_launch_that_waits_for_the_one_before_does_so_in_the_others_time():
    seen = [(16.0, "c", 6.0), (0.0, "a", 10.0), (7.0, "b", 8.0), (30.0, "d", 1.0), (30.5, "e", 0.2)]
    times = [(name, us) for _, name, us in one_by_one(seen)]
    assert times == [("a", 10.0), ("b", 5.0), ("c", 6.0), ("d", 1.0), ("e", 0.0)]


def test_launches_are_told_apart_from_the_flush_and_between_runs():
    """Five runs of a flush and two kernels, the last run slower."""
    seen = []
    for start in range(RUNS):
        slow = 100.0 if start == RUNS - 1 else 0.0
        seen += [(start, "flush", 9.0), (start, "product", 4.0 + slow), (start, "sum", 1.0 + start)]
    found = launch_times(seen, num_before=1)
    assert [(each.name, each.us) for each in found] == [("product", 4.0), ("sum", 3.0)]
    assert launch_times(seen[:-1], num_before=1) == []
    assert launch_times([*seen[:-1], (9, "other", 1.0)], num_before=1) == []
    assert launch_times([], num_before=0) == []


@pytest.mark.gpu
def test_a_breakdown_names_the_kernels():
    changes: dict[str, Any] = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    found = list(run(plan("activation", breakdown=True, **changes), lambda _: None))
    row = found[0]
    assert row.time is not None
    assert len(row.breakdown) == row.time.launches
    assert 0 < sum(each.us for each in row.breakdown) < 2 * row.time.median_us


@pytest.mark.gpu
def test_a_run_on_a_gpu():
    changes: dict[str, Any] = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    found = list(run(plan("rms_norm", "route", "experts", backends=(), **changes), lambda _: None))
    assert worst(found) == ""
    timed = [row for row in found if row.time is not None]
    assert {row.op for row in timed} == {"rms_norm", "route", "experts"}
    assert {row.time.method for row in timed if row.time and row.op == "rms_norm"} == {"graph"}
    assert found[0].ceilings.read_tb_per_s > 0.1
