"""A block of experts as the kernel timer sees it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.bench.test_kernels import ARCH, CPU, FixedTimer, plan, rows
from tetrad.bench.kernels import block as kernels_block
from tetrad.bench.kernels.block import NAME, block_cases, block_op, block_time, ops_with
from tetrad.bench.kernels.check import truth_of
from tetrad.core.presets import preset
from tetrad.core.ranks import Ranks
from tetrad.core.records import LaunchTime
from tetrad.kernels.registry import OPS
from tetrad.kernels.shapes import Load
from tetrad.layers.moe import JoinedFront

GLM = preset("glm-5")


def launches(*named: tuple[str, float]) -> list[LaunchTime]:
    return [LaunchTime(name=name, us=us) for name, us in named]


def test_a_rank_sees_all_tokens_and_holds_its_experts():
    whole, dealt = block_cases(GLM, Ranks(ep=8), Load(64))
    assert (whole["T"], whole["E"], whole["held"], whole["F"]) == (64, 256, (0, 32), 2048)
    assert (whole["shared"], dealt["shared"]) == (2048, 256)
    (alone,) = block_cases(GLM, Ranks(), Load(64))
    assert (alone["held"], alone["shared"]) == ((0, 256), 2048)
    (tensor_parallel,) = block_cases(GLM, Ranks(tp=8, ep=8), Load(64))
    assert (tensor_parallel["F"], tensor_parallel["shared"]) == (2048, 256)
    assert block_cases(GLM, Ranks(), Load(64, "uniform")) == []


@pytest.mark.parametrize("routing", ["random", "skewed"])
def test_blocks_are_timed_and_right(routing: str):
    loads = (Load(3, routing), Load(14, routing))  # type: ignore[arg-type]
    found = rows(plan(NAME, loads=loads, ranks=Ranks(ep=2)))
    assert [row.status for row in found] == ["ok"] * 4
    assert [row.tokens_per_expert for row in found] == [0.75, 0.75, 3.5, 3.5]
    assert {row.block for row in found} == {None}
    assert found[0].shape["held"] == (0, 4)


def test_a_wrong_routed_expert_shows():
    op = block_op(ARCH)
    (case,) = block_cases(ARCH, Ranks(), Load(14))
    arguments = op.check.inputs(case, torch.float32, CPU)
    truth = truth_of(op, arguments)
    moe = op.backends["torch"].prepare(arguments["weight"], torch.float32)
    assert isinstance(moe.front, JoinedFront)
    right = moe(arguments["x"], arguments["residual"])
    assert truth.error((right,)) < 1e-6
    run = moe.experts_op.run

    def off(x: Tensor, weight: object, ids: Tensor, *rest: Tensor) -> object:
        return run(x, weight, ids.roll(1, dims=0), *rest)

    moe.experts_op = replace(moe.experts_op, run=off)
    wrong = moe(arguments["x"], arguments["residual"])
    assert truth.error((wrong,)) > 0.02


def test_costs_count_what_the_rank_does():
    contract = block_op(GLM).contract
    whole, dealt = block_cases(GLM, Ranks(ep=8), Load(2048))
    routed = 6 * 2048 * 6144 * 2048
    router = 2 * 2048 * 6144 * 256
    assert contract.flops(whole) == pytest.approx(2 * routed + router)
    assert contract.flops(dealt) == pytest.approx(routed * (1 + 1 / 8) + router)
    experts_bytes = 32 * 3 * 6144 * 2048 * 4.5 / 8
    dense = 6144 * (256 + 3 * 256) + 3 * 2048 * 6144
    assert contract.bytes(dealt, 2) == pytest.approx(experts_bytes + 2 * dense, rel=1e-6)


def test_a_layer_that_was_not_drawn_yet_knows_its_size():
    """Else small-looking inputs would be drawn four times."""
    (case,) = block_cases(ARCH, Ranks(), Load(3))
    layer = block_op(ARCH).check.inputs(case, torch.float32, CPU)["weight"]
    expected = layer.nbytes
    block_op(ARCH).backends["torch"].prepare(layer, torch.float32)
    drawn = sum(weight.nbytes for weight in layer._drawn.values())
    assert expected == pytest.approx(drawn, rel=0.01)


def test_products_are_what_runs_between_sort_and_sum():
    glue = [("gemm", 6.0), ("route_activate_kernel", 3.0), ("gemm", 5.0)]
    found = block_time(
        launches(
            *glue, ("sort_kernel", 2.0), ("persistent_product", 100.0), ("grouped_product", 60.0),
            ("reduce_kernel", 3.0),
        ),
        median_us=200.0,
    )  # fmt: skip
    assert found is not None
    assert found.grouped_us == 160.0
    assert found.ratio == 1.25
    assert found.target_us == pytest.approx(196.0)


def test_a_product_may_take_two_launches():
    parts = [("persistent_product", 100.0), ("grouped_product", 60.0)] * 2
    found = block_time(launches(("sort_kernel", 2.0), *parts, ("reduce_kernel", 3.0)), 400.0)
    assert found is not None
    assert found.grouped_us == 320.0


def test_no_choice_of_experts_hangs_on_rounding(monkeypatch: pytest.MonkeyPatch):
    """Two right routers may break a near-tie differently, and the block would count as wrong."""
    (case,) = block_cases(ARCH, Ranks(), Load(40))
    check = block_op(ARCH).check
    before = check.inputs(case, torch.float32, CPU)
    monkeypatch.setattr(kernels_block, "CLEAR_GAP", 0.02)
    after = check.inputs(case, torch.float32, CPU)
    router = (
        after["weight"]
        .linear("gate", (ARCH.moe.num_experts, ARCH.hidden))
        .dequantize(torch.float64)
    )

    def gaps(x: torch.Tensor) -> torch.Tensor:
        scores = (x.double() @ router.T).sigmoid()
        best = scores.topk(ARCH.moe.experts_per_token + 1).values
        gap: torch.Tensor = best[:, -2] - best[:, -1]
        return gap

    assert gaps(before["x"]).min() < 0.02 < gaps(after["x"]).min()


def test_another_order_of_launches_has_no_products():
    """A backend that sorts otherwise; one that quantises between; a profiler that saw nothing."""
    products = [("quantize_kernel", 1.0), ("fp4_product", 1.0)] * 2
    assert block_time(launches(("gather", 1.0), ("reduce_kernel", 1.0)), 9.0) is None
    assert (
        block_time(launches(("sort_kernel", 1.0), *products, ("reduce_kernel", 1.0)), 9.0) is None
    )
    assert block_time([], 9.0) is None


@pytest.mark.parametrize("names", [["grouped_gemm"] * 2, [], ["quantize_kernel", "grouped_gemm"]])
def test_an_unknown_product_is_told(names: list[str]):
    """A kernel with another name once made the comparison disappear in silence."""
    named = ["sort_kernel", *names, "reduce_kernel"]
    with pytest.raises(AssertionError, match="PRODUCTS must name"):
        block_time(launches(*((name, 1.0) for name in named)), 9.0)
    with pytest.raises(AssertionError, match="PRODUCTS must name"):
        block_time(launches(("sort_kernel", 1.0), ("grouped_product", 1.0)), 9.0)


def test_the_other_ops_take_their_first_backend_that_can_run():
    ops = ops_with(OPS["experts"].backends["triton"], CPU)
    assert (ops.experts.name, ops.route.name) == ("triton", "torch")


def test_the_timer_takes_one_layer(monkeypatch: pytest.MonkeyPatch):
    timer = FixedTimer()
    rows(plan(NAME), timer)
    assert timer.num_calls[-1] == 1


@pytest.mark.gpu
def test_a_block_on_a_gpu():
    changes = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "budget_s": 120.0}
    wide = replace(
        ARCH, hidden=1024, moe=replace(ARCH.moe, intermediate=512, shared_intermediate=512)
    )
    found = rows_on_gpu(plan(NAME, arch=wide, backends=("triton",), tokens=(64,), **changes))
    assert [row.status for row in found] == ["ok"], found[0].detail
    assert found[0].block is not None
    assert found[0].time is not None
    assert 0 < found[0].block.grouped_us < found[0].time.median_us


def rows_on_gpu(asked):
    from tetrad.bench.kernels.run import run

    return list(run(asked, lambda _: None))
