"""The linear kernel on a GPU: real sizes, every tile, repeats, graphs, dirty memory, no waiting."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.dirt import dirty_memory
from tests.kernels.linear import Drawn, draw_linear, relative_error
from tetrad.kernels.device import waiting_is_an_error
from tetrad.kernels.experts.tiles import HOPPER
from tetrad.kernels.linear import triton as linear_triton
from tetrad.kernels.linear.tiles import (
    FP8_HOPPER_TILES,
    FP8_OTHER_TILES,
    NVFP4_HOPPER_TILES,
    NVFP4_OTHER_TILES,
    LinearTile,
    fitted,
)

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
TOLERANCE = 2e-3
"""Relative L2 error of a product rounded once to bf16, which alone makes 1.7e-3."""
FORMATS = ("nvfp4", "fp8_block", "fp8_tensor")
MATRICES = ((2048, 6144), (6144, 2048), (12288, 6144), (576, 6144), (6144, 1536))


def large(format_name: str, out: int, width: int, num_tokens: int, seed: int = 0) -> Drawn:
    return draw_linear(GPU, format_name, out, width, num_tokens, is_large=True, seed=seed)


@pytest.mark.parametrize("num_tokens", [1, 7, 16, 33, 64, 65, 300, 2048])
@pytest.mark.parametrize("format_name", FORMATS)
def test_real_sizes_against_float64(format_name: str, num_tokens: int):
    for out, width in MATRICES:
        drawn = large(format_name, out, width, num_tokens)
        dirty_memory()
        y = linear_triton.run(drawn.x, drawn.packed)
        assert relative_error(y, drawn.expected()) <= TOLERANCE, (out, width)
        assert int(drawn.packed.arrived.count_nonzero()) == 0


@pytest.mark.parametrize("num_tokens", [1, 20, 200])
@pytest.mark.parametrize(
    ("format_name", "out", "width"),
    [
        ("nvfp4", 1, 16), ("nvfp4", 300, 1040), ("nvfp4", 129, 5136), ("fp8_block", 1, 1),
        ("fp8_block", 300, 1031), ("fp8_block", 129, 5130), ("fp8_tensor", 37, 51),
    ],
)  # fmt: skip
def test_odd_sizes(format_name: str, out: int, width: int, num_tokens: int):
    drawn = draw_linear(GPU, format_name, out, width, num_tokens)
    dirty_memory()
    y = linear_triton.run(drawn.x, drawn.packed)
    assert relative_error(y, drawn.expected()) <= TOLERANCE


@pytest.mark.parametrize("splits", [1, 2, 8, 16])
@pytest.mark.parametrize("format_name", ["nvfp4", "fp8_block"])
def test_a_hundred_runs_are_one(format_name: str, splits: int):
    """A race between copies, decoding, tensor cores and those who add shows as a moving result."""
    capability = torch.cuda.get_device_capability()
    for tile in tiles_of(format_name, capability):
        drawn = large(format_name, 2048, 6144, 2 * tile.rows - 3)
        fitting = fitted(tile, drawn.packed.packed_width, capability, drawn.packed.bits)
        first = linear_triton.product(drawn.x, drawn.packed, fitting, splits, capability)
        assert relative_error(first, drawn.expected()) <= TOLERANCE, tile
        for _ in range(100):
            dirty_memory()
            y = linear_triton.product(drawn.x, drawn.packed, fitting, splits, capability)
            assert torch.equal(y, first), tile


def tiles_of(format_name: str, capability: tuple[int, int]) -> list[LinearTile]:
    """All that the table has for this GPU."""
    on_hopper = capability[0] == HOPPER
    if format_name == "nvfp4":
        tiles = NVFP4_HOPPER_TILES if on_hopper else NVFP4_OTHER_TILES
    else:
        tiles = FP8_HOPPER_TILES if on_hopper else FP8_OTHER_TILES
    return [tile for _, tile in tiles]


def test_a_row_does_not_depend_on_its_neighbours():
    """In a step of the same tile."""
    drawn = large("nvfp4", 2048, 6144, 16)
    together = linear_triton.run(drawn.x, drawn.packed)
    alone = [linear_triton.run(drawn.x[row : row + 1], drawn.packed) for row in range(16)]
    assert torch.equal(together, torch.cat(alone))


def test_rows_that_do_not_follow_one_another():
    drawn = large("nvfp4", 2048, 6144, 5)
    wide = torch.cat([drawn.x, drawn.x], dim=1)
    y = linear_triton.run(wide[:, :6144], drawn.packed)
    assert torch.equal(y, linear_triton.run(drawn.x, drawn.packed))


@pytest.mark.parametrize("num_tokens", [1, 16, 64, 300])
@pytest.mark.parametrize("format_name", ["nvfp4", "fp8_block"])
def test_a_graph_replays_with_other_inputs(format_name: str, num_tokens: int):
    first, second = (large(format_name, 2048, 6144, num_tokens, seed) for seed in range(2))
    x = first.x.clone()
    linear_triton.run(x, first.packed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear_triton.run(x, first.packed)
    for given in (second.x, first.x, second.x):
        x.copy_(given)
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, linear_triton.run(given, first.packed))
        assert relative_error(y, first.expected(given)) <= TOLERANCE


def test_matrices_on_streams_of_their_own_do_not_meet():
    drawn = [large("nvfp4", 2048, 6144, 16, seed) for seed in range(4)]
    expected = [linear_triton.run(each.x, each.packed) for each in drawn]
    streams = [torch.cuda.Stream() for _ in drawn]
    torch.cuda.synchronize()
    for _ in range(50):
        found = []
        for each, stream in zip(drawn, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(linear_triton.run(each.x, each.packed))
        torch.cuda.synchronize()
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("format_name", FORMATS)
def test_the_host_never_waits(format_name: str):
    drawn = large(format_name, 2048, 6144, 16)
    linear_triton.run(drawn.x, drawn.packed)
    with waiting_is_an_error():
        linear_triton.run(drawn.x, drawn.packed)
