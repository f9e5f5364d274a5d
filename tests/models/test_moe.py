"""A block of experts: what it launches, and when its products are joined."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.factories import TINY_GLM
from tests.models.recorded import OnDevice, Recorder, Stored, seeded, torch_ops
from tetrad.bench.kernels.breakdown import breakdown
from tetrad.core.arch import ModelArch
from tetrad.kernels.select import OpSet, resolve_ops
from tetrad.kernels.timer import CudaTimer
from tetrad.layers.moe import JoinedFront, Moe, SeparateFront
from tetrad.layers.norm import formed
from tetrad.layers.source import WeightLedger, WeightSource

ARCH = ModelArch.from_config(TINY_GLM)
LAUNCHES = {"experts": 4}
"""Of a backend on a GPU, where it is not 1: sort, two grouped products, sum."""


def block(
    stored: Stored, ops: OpSet | None = None, dtype: torch.dtype = torch.float32, **options: Any
) -> Moe:
    return Moe(ARCH, WeightSource(stored, ops or torch_ops(), dtype, WeightLedger()), **options)


def recorded(stored: Stored) -> Recorder:
    seen = Recorder()
    moe = block(stored, seen.wrapped(torch_ops()))
    x, residual = rows()
    with seen:
        moe(x, residual)
    return seen


def rows() -> tuple[Tensor, Tensor]:
    x, residual = torch.randn(2, 5, ARCH.hidden, generator=seeded("rows"))
    return x, residual


def test_a_block_takes_seven_launches():
    """Not a cast, copy or addition between them; `experts` launches four on a GPU."""
    seen = recorded(Stored("experts."))
    assert seen.ops == ["router", "route_activate", "linear", "experts"]
    assert seen.torch == []
    assert sum(LAUNCHES.get(name, 1) for name in seen.ops) == 7


def test_a_quantised_shared_expert_stands_apart():
    for name in ("shared_experts.gate", "shared_experts"):
        seen = recorded(Stored(name))
        assert seen.ops == [
            "router",
            "route",
            "linear",
            "linear",
            "activation",
            "linear",
            "experts",
        ]
        assert seen.torch == []


def test_padding_gets_no_expert_and_changes_no_other_row():
    moe, (x, residual) = block(Stored("experts.")), rows()
    is_padding = (torch.arange(len(x)) >= 3).unsqueeze(1)
    _, ids, _ = moe.route(x, is_padding)
    assert (ids[:3] >= 0).all()
    assert (ids[3:] == -1).all()
    padded, whole = (formed(moe(x, residual, padding)) for padding in (is_padding, None))
    torch.testing.assert_close(padded[:3], whole[:3])


def test_joined_products_give_what_separate_ones_give(monkeypatch: pytest.MonkeyPatch):
    stored, (x, residual) = Stored("experts."), rows()
    joined = block(stored)
    monkeypatch.setattr(WeightSource, "can_join", lambda self, weights: False)
    separate = block(stored)
    assert isinstance(joined.front, JoinedFront)
    assert isinstance(separate.front, SeparateFront)
    torch.testing.assert_close(joined(x, residual), separate(x, residual))


@pytest.mark.parametrize(
    ("stored", "dtype", "front"),
    [
        (torch.bfloat16, torch.bfloat16, JoinedFront),
        (torch.bfloat16, torch.float32, JoinedFront),
        (torch.float32, torch.float32, JoinedFront),
        (torch.float32, torch.bfloat16, SeparateFront),
    ],
)
def test_a_router_is_not_rounded_to_be_joined(stored: torch.dtype, dtype: torch.dtype, front: Any):
    moe = block(Stored(dtype=stored), dtype=dtype)
    assert isinstance(moe.front, front)
    weight = moe.front.weight.dequantize(torch.float32)[: ARCH.moe.num_experts]
    exact = Stored(dtype=stored).linear("gate", (ARCH.moe.num_experts, ARCH.hidden))
    assert torch.equal(weight, exact.dequantize(torch.float32))


def test_ranks_that_hold_some_experts_add_up_to_the_whole():
    """Each rank adds the shared expert, and a residual of zero."""
    stored, (x, _) = Stored(), rows()
    nothing = torch.zeros_like(x)
    whole = formed(block(stored)(x, nothing))
    ranks = [block(stored, held=range(first, first + 2)) for first in range(0, 8, 2)]
    parts = [formed(rank(x, nothing)) for rank in ranks]
    assert ARCH.moe.num_experts == 8
    alone = ranks[0].down(ranks[0].front(x)[2])
    torch.testing.assert_close(torch.stack(parts).sum(0) - 3 * alone, whole, rtol=1e-5, atol=1e-5)
    assert float((parts[0] - whole).abs().max()) > 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 64, 512])
def test_a_block_takes_seven_launches_on_a_gpu(num_tokens: int):
    """cuBLAS may add one to a product whose sum it splits."""
    moe_arch = replace(ARCH.moe, intermediate=512, shared_intermediate=512)
    arch = replace(ARCH, hidden=1024, moe=moe_arch)
    place = torch.device("cuda")
    source = WeightSource(
        OnDevice("experts."), resolve_ops("cuda", dtype=torch.bfloat16), torch.bfloat16,
        WeightLedger(),
    )  # fmt: skip
    moe = Moe(arch, source)
    x, residual = torch.randn(2, num_tokens, arch.hidden, device=place).bfloat16()
    timer = CudaTimer(place)
    found = timer.time([lambda: moe(x, residual)], 0.05)
    assert found.method == "graph", found.note
    names = [launch.name for launch in breakdown(lambda: moe(x, residual), timer.flush)]
    splits = [name for name in names if "splitk" in name.lower()]
    assert found.launches is not None
    assert found.launches - len(splits) <= 7, names
