"""FP8 experts on a GPU: every tile against float64, again and again; the op of both backends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.experts import draw_experts
from tests.kernels.test_experts_gpu import TOLERANCE, both_products, errors, grouping_of
from tetrad.kernels.experts import gluon as gluon_backend
from tetrad.kernels.experts import triton as triton_backend
from tetrad.kernels.experts.tiles import TileShape, triton_tiles

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")


def tile_of(index: int) -> TileShape:
    return triton_tiles(torch.cuda.get_device_capability())[index][1]


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("format_name", ["fp8_block", "fp8_tensor"])
def test_each_product_against_float64(format_name: str, index: int):
    drawn = draw_experts(
        GPU, experts=6, used=5, tokens=150, slots=3, hidden=520, width=392, dropped=0.2,
        format_name=format_name,
    )  # fmt: skip
    grouping = grouping_of(drawn, triton_backend.grouped, tile_of(index))
    hidden, by_slot = both_products(drawn, triton_backend.grouped, grouping)
    gate_up, down, checked = errors(drawn, grouping, hidden, by_slot)
    assert checked == int((drawn.routed[0] >= 0).sum())
    assert gate_up <= TOLERANCE
    assert down <= TOLERANCE


@pytest.mark.parametrize("index", range(4))
def test_a_hundred_runs_are_one(index: int):
    """GLM-5 widths: a race between copies, decoding and tensor cores shows as a moving result."""
    tile = tile_of(index)
    drawn = draw_experts(
        GPU, experts=8, tokens=tile.block * 4, slots=2, hidden=6144, width=2048,
        format_name="fp8_block",
    )  # fmt: skip
    grouping = grouping_of(drawn, triton_backend.grouped, tile)
    first = both_products(drawn, triton_backend.grouped, grouping)
    gate_up, down, _ = errors(drawn, grouping, *first)
    assert gate_up <= TOLERANCE
    assert down <= TOLERANCE
    filled = grouping.rows >= 0
    for _ in range(100):
        hidden, by_slot = both_products(drawn, triton_backend.grouped, grouping)
        assert torch.equal(hidden[filled], first[0][filled])
        assert torch.equal(by_slot, first[1])


@pytest.mark.parametrize("backend", [triton_backend.BACKEND, gluon_backend.BACKEND])
@pytest.mark.parametrize("tokens", [1, 40, 3000])
@pytest.mark.parametrize(
    "formats",
    [
        {"format_name": "fp8_block"},
        {"format_name": "fp8_tensor"},
        {"format_name": "fp8_block", "hidden": 296, "width": 72},
        {"down_format_name": "fp8_block"},
        {"format_name": "bf16", "down_format_name": "fp8_tensor"},
    ],
    ids=str,
)
def test_the_op(backend: Any, tokens: int, formats: dict[str, Any]):
    options = {"hidden": 512, "width": 384, "experts": 8} | formats
    drawn = draw_experts(GPU, tokens=tokens, slots=2, **options)
    y = backend.run(drawn.x, drawn.prepared, *drawn.routed)
    truth = drawn.expected()
    assert float((y.double() - truth).norm() / truth.norm()) <= 6e-3
