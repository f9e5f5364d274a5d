"""The dense kernel on a GPU: real sizes, every tile, repeats, graphs, dirty memory, no waiting."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.dirt import dirty_memory
from tests.kernels.linear import DrawnDense, draw_dense, relative_error
from tetrad.kernels.device import waiting_is_an_error
from tetrad.kernels.experts.tiles import HOPPER
from tetrad.kernels.linear import triton_dense
from tetrad.kernels.linear.dense_tiles import HOPPER_TILES, DenseTile
from tetrad.kernels.linear.triton_dense import DenseLinear

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
TOLERANCE = {torch.bfloat16: 2e-3, torch.float32: 3e-5}
"""Relative L2 error: rounding to bf16 alone makes 1.7e-3; fp32 as in the router's contract."""
DTYPES = tuple(TOLERANCE)
MATRICES = ((2784, 6144), (16384, 2048), (6144, 16384), (4352, 6144), (6144, 2048), (19360, 6144))
BY_THREADS = DenseTile(64, 16, 64, stages=3, is_bulk=False)
"""Small enough for every GPU."""


def is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == HOPPER


def tiles() -> list[DenseTile]:
    """What this GPU can run, with both kinds of copies on Hopper."""
    if is_hopper():
        table = [tile for _, tile in HOPPER_TILES]
        return [replace(tile, is_bulk=is_bulk) for tile in table for is_bulk in (True, False)]
    return [BY_THREADS]


def check(drawn: DrawnDense, y: Tensor) -> None:
    assert relative_error(y, drawn.expected()) <= TOLERANCE[y.dtype]
    assert int(drawn.weight.arrived.count_nonzero()) == 0


@pytest.mark.parametrize("num_tokens", [1, 7, 16, 17, 33, 64, 65, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_real_sizes_against_float64(dtype: torch.dtype, num_tokens: int):
    for out, width in MATRICES:
        drawn = draw_dense(GPU, out, width, num_tokens)
        dirty_memory()
        check(drawn, triton_dense.run(drawn.x, drawn.weight, dtype))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("num_tokens", [1, 20, 150])
@pytest.mark.parametrize(
    ("out", "width"), [(1, 1), (1, 16), (300, 1040), (129, 5130), (37, 51), (200, 1031)]
)
def test_odd_sizes(out: int, width: int, num_tokens: int, splits: int):
    for tile in tiles():
        drawn = draw_dense(GPU, out, width, num_tokens)
        dirty_memory()
        check(drawn, triton_dense.product(drawn.x, drawn.weight, tile, splits, torch.bfloat16))


@pytest.mark.parametrize("splits", [1, 2, 6, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_hundred_runs_are_one(dtype: torch.dtype, splits: int):
    """A race between copies, tensor cores and those who add shows as a moving result."""
    for tile in tiles():
        drawn = draw_dense(GPU, 2784, 6144, 2 * tile.rows - 3)
        first = triton_dense.product(drawn.x, drawn.weight, tile, splits, dtype)
        check(drawn, first)
        for _ in range(100):
            dirty_memory()
            y = triton_dense.product(drawn.x, drawn.weight, tile, splits, dtype)
            assert torch.equal(y, first), tile


@pytest.mark.parametrize("tile", tiles(), ids=str)
def test_a_row_does_not_depend_on_its_neighbours(tile: DenseTile):
    """In a step of the same tile and as many splits; not even on what is not finite."""
    drawn = draw_dense(GPU, 4352, 6144, tile.rows)
    together = triton_dense.product(drawn.x, drawn.weight, tile, 4, torch.float32)
    for row in range(tile.rows):
        alone = drawn.x[row : row + 1].contiguous()
        y = triton_dense.product(alone, drawn.weight, tile, 4, torch.float32)
        assert torch.equal(y[0], together[row])
    for row, poison in ((3, torch.nan), (5, torch.inf), (tile.rows - 1, -torch.inf)):
        drawn.x[row, 77 * row] = poison
    bad = [3, 5, tile.rows - 1]
    after = triton_dense.product(drawn.x, drawn.weight, tile, 4, torch.float32)
    kept = [row for row in range(tile.rows) if row not in bad]
    assert torch.equal(after[kept], together[kept])
    assert not after[bad].isfinite().any()


@pytest.mark.skipif(not is_hopper(), reason="kernels overlap from Hopper on")
def test_kernels_that_overlap_read_what_the_one_before_wrote():
    """Each multiplies the last one's result, in memory that the allocator hands on."""
    up, down = draw_dense(GPU, 6144, 2048, 16), draw_dense(GPU, 2048, 6144, 16, seed=1)
    bulk = DenseTile(64, 16, 128, stages=5)

    def chained(tile: DenseTile) -> Tensor:
        x = up.x
        for _ in range(6):
            x = triton_dense.product(x, up.weight, tile, 2, torch.bfloat16)
            x = triton_dense.product(x, down.weight, tile, 6, torch.bfloat16)
        return x

    expected = chained(bulk)
    ahead = replace(bulk, ahead=512)
    graph = torch.cuda.CUDAGraph()
    chained(ahead)
    with torch.cuda.graph(graph):
        y = chained(ahead)
    for _ in range(100):
        assert torch.equal(chained(ahead), expected)
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, expected)


def test_rows_that_do_not_follow_one_another():
    drawn = draw_dense(GPU, 4352, 6144, 5)
    wide = torch.cat([drawn.x, drawn.x], dim=1)
    y = triton_dense.run(wide[:, :6144], drawn.weight, torch.float32)
    assert torch.equal(y, triton_dense.run(drawn.x, drawn.weight, torch.float32))


@pytest.mark.parametrize("tile", tiles(), ids=str)
def test_a_matrix_where_the_copy_engine_cannot_read(tile: DenseTile):
    """Its first number is 2 bytes from where 16 bytes begin."""
    drawn = draw_dense(GPU, 208, 2048, 5)
    memory = torch.zeros(208 * 2048 + 1, dtype=torch.bfloat16, device=GPU)[1:]
    shifted = memory.view(208, 2048).copy_(drawn.weight.weight)
    weight = DenseLinear(shifted, drawn.weight.arrived)
    check(drawn, triton_dense.product(drawn.x, weight, tile, 2, torch.bfloat16))


@pytest.mark.parametrize("num_tokens", [1, 16, 64, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_graph_replays_with_other_inputs(dtype: torch.dtype, num_tokens: int):
    first, second = (draw_dense(GPU, 2784, 6144, num_tokens, seed) for seed in range(2))
    x = first.x.clone()
    triton_dense.run(x, first.weight, dtype)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = triton_dense.run(x, first.weight, dtype)
    for given in (second.x, first.x, second.x):
        x.copy_(given)
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, triton_dense.run(given, first.weight, dtype))
        assert relative_error(y, first.expected(given)) <= TOLERANCE[dtype]


def test_matrices_on_streams_of_their_own_do_not_meet():
    drawn = [draw_dense(GPU, 2784, 6144, 16, seed) for seed in range(4)]
    expected = [triton_dense.run(each.x, each.weight, torch.float32) for each in drawn]
    streams = [torch.cuda.Stream() for _ in drawn]
    torch.cuda.synchronize()
    for _ in range(50):
        found = []
        for each, stream in zip(drawn, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(triton_dense.run(each.x, each.weight, torch.float32))
        torch.cuda.synchronize()
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("num_tokens", [1, 64, 300])
def test_the_host_never_waits(num_tokens: int):
    drawn = draw_dense(GPU, 2784, 6144, num_tokens)
    triton_dense.run(drawn.x, drawn.weight, torch.float32)
    with waiting_is_an_error():
        triton_dense.run(drawn.x, drawn.weight, torch.float32)
