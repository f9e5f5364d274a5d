"""Grouped products on a GPU: every tile of every table, against float64, again and again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.experts import Drawn, draw_experts, one_matrix, random_stack
from tetrad.formats.weights import Nvfp4Weight
from tetrad.kernels.experts import gluon as gluon_backend
from tetrad.kernels.experts import packing, triton_packing
from tetrad.kernels.experts import triton as triton_backend
from tetrad.kernels.experts.grouping import Grouping, Routed, cores_of, in_groups
from tetrad.kernels.experts.tiles import GLUON_TILES, HOPPER, TRITON_HOPPER_TILES, TileShape
from tetrad.kernels.sort_tokens import triton as sort_tokens

pytestmark = pytest.mark.gpu

TOLERANCE = 2e-3
"""Relative L2 error of one product with one bf16 rounding, which alone makes 1.7e-3."""
Product = Callable[..., None]
TILES = [
    *(
        pytest.param(triton_backend.grouped, tile, id=f"triton-{tile.block}")
        for _, tile in TRITON_HOPPER_TILES
    ),
    *(
        pytest.param(gluon_backend.grouped, tile, id=f"gluon-{tile.block}")
        for tile in dict.fromkeys(tile for _, tile in GLUON_TILES)
    ),
    *(
        pytest.param(gluon_backend.grouped, replace(GLUON_TILES[0][1], parts=n), id=f"gluon-16x{n}")
        for n in (2, 4)
    ),
]


def capability_for(product: Product) -> tuple[int, int]:
    capability = torch.cuda.get_device_capability()
    if product is gluon_backend.grouped and capability[0] != HOPPER:
        pytest.skip("Gluon kernels are for Hopper")
    return capability


def grouping_of(drawn: Drawn, product: Product, tile: TileShape) -> Grouping:
    ids = drawn.routed[0]
    rows = sort_tokens.run(ids, drawn.weight.num_experts, tile.block, tile.small_block)
    return Grouping(*rows, ids.shape[1], tile, capability_for(product), cores_of(drawn.x.device))


def both_products(drawn: Drawn, product: Product, grouping: Grouping) -> tuple[Tensor, Tensor]:
    """hidden [positions, F] and by_slot [T * K, D], poisoned before."""
    weight, device = drawn.prepared, drawn.x.device
    hidden = torch.full((len(grouping.rows), weight.gate_up.features), torch.nan, device=device)
    hidden = hidden.bfloat16()
    product(drawn.x, weight.gate_up, grouping, hidden, is_gate_up=True)
    num_slots = drawn.routed[0].numel()
    by_slot = torch.full((num_slots, weight.down.features), torch.nan, device=device).bfloat16()
    product(hidden, weight.down, grouping, by_slot, is_gate_up=False)
    return hidden, by_slot


def errors(
    drawn: Drawn, grouping: Grouping, hidden: Tensor, by_slot: Tensor
) -> tuple[float, float, int]:
    """Relative L2 errors of gate_up and down, each from its own bf16 input, and rows checked."""
    rows = grouping.rows.long()
    expert_of = grouping.tile_expert.repeat_interleave(grouping.tile.block)
    sums = torch.zeros(4, dtype=torch.float64, device=rows.device)
    checked = 0
    for expert in range(drawn.weight.num_experts):
        position = ((expert_of == expert) & (rows >= 0)).nonzero()[:, 0]
        if not len(position):
            continue
        x = drawn.x[rows[position] // grouping.num_slots].double()
        gate, up, down = (
            one_matrix(stack, expert)
            for stack in (drawn.weight.gate, drawn.weight.up, drawn.weight.down)
        )
        gated = x @ gate.T
        truth = gated / (1 + (-gated).exp()) * (x @ up.T)
        ours = hidden[position].double()
        down_truth = ours @ down.T
        pairs = ((ours, truth), (by_slot[rows[position]].double(), down_truth))
        sums += torch.stack(
            [n for a, b in pairs for n in ((a - b).square().sum(), b.square().sum())]
        )
        checked += len(position)
    gate_up = float((sums[0] / sums[1]).sqrt())
    return gate_up, float((sums[2] / sums[3]).sqrt()), checked


@pytest.mark.parametrize(("product", "tile"), TILES)
@pytest.mark.parametrize("seed", range(3))
def test_each_product_against_float64(product: Product, tile: TileShape, seed: int):
    """Fresh numbers each time; experts get from none to several tiles of tokens."""
    drawn = draw_experts(
        torch.device("cuda"), experts=6, used=5, tokens=(7, 150, 420)[seed], slots=3,
        hidden=512, width=384, dropped=0.2, seed=seed,
    )  # fmt: skip
    grouping = grouping_of(drawn, product, tile)
    hidden, by_slot = both_products(drawn, product, grouping)
    gate_up, down, checked = errors(drawn, grouping, hidden, by_slot)
    ids = drawn.routed[0]
    assert checked == int((ids >= 0).sum())
    assert gate_up <= TOLERANCE
    assert down <= TOLERANCE
    assert by_slot[ids.flatten() < 0].isnan().all()
    assert hidden[grouping.rows < 0].isnan().all()


@pytest.mark.parametrize(("product", "tile"), TILES)
def test_a_hundred_runs_are_one(product: Product, tile: TileShape):
    """GLM-5 widths: a race between copies, decoding and tensor cores shows as a moving result."""
    drawn = draw_experts(
        torch.device("cuda"), experts=8, tokens=tile.block * 4, slots=2, hidden=6144, width=2048
    )
    grouping = grouping_of(drawn, product, tile)
    first = both_products(drawn, product, grouping)
    gate_up, down, _ = errors(drawn, grouping, *first)
    assert gate_up <= TOLERANCE
    assert down <= TOLERANCE
    filled = grouping.rows >= 0
    for _ in range(100):
        hidden, by_slot = both_products(drawn, product, grouping)
        assert torch.equal(hidden[filled], first[0][filled])
        assert torch.equal(by_slot, first[1])


def test_packing_in_one_launch():
    """The matrices of a rank's experts, of which the plain version converts some at a time."""
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)
    for rows, width, parts in ((2048, 6144, 2), (6144, 2048, 1), (1000, 336, 1)):
        drawn = [random_stack("nvfp4", 6, rows, width, generator) for _ in range(parts)]
        stacks = tuple(stack for stack in drawn if isinstance(stack, Nvfp4Weight))
        plain, launched = packing.pack(stacks), triton_packing.pack(stacks)
        assert torch.equal(plain.words, launched.words)
        assert torch.equal(plain.scales, launched.scales)


@pytest.mark.parametrize("backend", [triton_backend.BACKEND, gluon_backend.BACKEND])
@pytest.mark.parametrize(
    "case",
    [
        {"tokens": 1, "slots": 4},
        {"tokens": 64, "used": 2},
        {"tokens": 3000, "slots": 2},
        {"tokens": 33, "dropped": 1.0},
        {"tokens": 40, "format_name": "bf16"},
        {"tokens": 40, "format_name": "bf16", "hidden": 296, "width": 72},
        {"tokens": 40, "hidden": 288, "width": 80},
    ],
    ids=str,
)
def test_the_op(backend: Any, case: dict[str, Any]):
    options = {"hidden": 512, "width": 384, "experts": 8} | case
    drawn = draw_experts(torch.device("cuda"), **options)
    y = backend.run(drawn.x, drawn.prepared, *drawn.routed)
    truth = drawn.expected()
    assert float((y.double() - truth).norm() / truth.norm()) <= 6e-3


def copied(routed: Routed) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ids, slot_weights, shared, residual = routed
    assert shared is not None
    assert residual is not None
    return ids.clone(), slot_weights.clone(), shared.clone(), residual.clone()


@pytest.mark.parametrize(("product", "tile"), TILES)
def test_a_graph_replays_with_other_inputs(product: Product, tile: TileShape):
    """No sizes are frozen at capture: other tokens choose other experts, the buffers stay."""
    capability = capability_for(product)
    first, second, third = (
        draw_experts(
            torch.device("cuda"), experts=8, tokens=160, slots=2, hidden=512, width=384,
            used=used, dropped=dropped, seed=seed,
        )
        for seed, (used, dropped) in enumerate(((8, 0.0), (2, 0.0), (5, 0.7)))
    )  # fmt: skip
    x, routed = first.x.clone(), copied(first.routed)

    def step() -> Tensor:
        return in_groups(x, first.prepared, routed, tile, capability, product)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    for drawn in (second, third, first):
        x.copy_(drawn.x)
        for mine, theirs in zip(routed, copied(drawn.routed), strict=True):
            mine.copy_(theirs)
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, step())
        truth = Drawn(drawn.x, first.weight, first.prepared, drawn.routed).expected()
        assert float((y.double() - truth).norm() / truth.norm()) <= 6e-3
