"""The dense kernel on a GPU: real sizes, every tile, repeats, graphs, dirty memory, no waiting."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.dirt import dirty_memory
from tests.kernels.linear import DrawnDense, draw_dense, relative_error
from tetrad.kernels.device import waiting_is_an_error
from tetrad.kernels.experts.tiles import HOPPER
from tetrad.kernels.linear import triton_dense
from tetrad.kernels.linear.dense_tiles import HOPPER_STEPS, DenseTile
from tetrad.kernels.linear.triton_dense import DenseLinear
from tetrad.kernels.registry import OPS

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
TOLERANCE = {torch.bfloat16: 2e-3, torch.float32: 3e-5}
"""Relative L2 error: rounding to bf16 alone makes 1.7e-3; fp32 as in the router's contract."""
ONE_ROUNDING = 2.0**-8
"""Rounding to bf16 moves a number by up to that share of it, and few numbers do not average."""
MATRICES = ((2784, 6144), (16384, 2048), (6144, 16384), (4352, 6144), (6144, 2048), (19360, 6144))
SMALL = DenseTile(64, 16, 64, stages=3)
"""Small enough for every GPU that has a copy engine."""


def tiles() -> list[DenseTile]:
    """What this GPU can run."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == HOPPER:
        table = (tile for step in HOPPER_STEPS for tile in (step.small, step.large))
        return list(dict.fromkeys(table))
    return [SMALL]


def check(drawn: DrawnDense, y: Tensor) -> None:
    tolerance = TOLERANCE[y.dtype]
    if y.dtype == torch.bfloat16 and y.numel() < 1000:
        tolerance = ONE_ROUNDING + TOLERANCE[torch.float32]
    assert relative_error(y, drawn.expected()) <= tolerance
    assert int(drawn.weight.arrived.count_nonzero()) == 0


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 64, 300])
@pytest.mark.parametrize(("out", "width"), MATRICES)
def test_real_sizes_against_float64(out: int, width: int, num_tokens: int):
    drawn = draw_dense(GPU, out, width, num_tokens)
    for dtype in TOLERANCE:
        dirty_memory()
        check(drawn, triton_dense.run(drawn.x, drawn.weight, dtype))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("tile", tiles(), ids=str)
def test_odd_sizes(tile: DenseTile, splits: int):
    for out, width in ((1, 16), (300, 1040), (129, 1032)):
        for num_tokens in (1, 20, 150):
            drawn = draw_dense(GPU, out, width, num_tokens)
            dirty_memory()
            check(drawn, triton_dense.product(drawn.x, drawn.weight, tile, splits, torch.bfloat16))


@pytest.mark.parametrize("num_tokens", [1, 20, 150])
@pytest.mark.parametrize(("out", "width"), [(1, 1), (129, 5130), (37, 51), (200, 1031)])
def test_rows_of_an_odd_length(out: int, width: int, num_tokens: int):
    """By cuBLAS, which may add parts in bf16."""
    drawn = draw_dense(GPU, out, width, num_tokens)
    for op, dtype in (("linear", torch.bfloat16), ("router", torch.float32)):
        y = triton_dense.run(drawn.x, drawn.weight, dtype)
        error = relative_error(y, drawn.expected())
        assert error <= OPS[op].contract.tolerance["bfloat16"]


@pytest.mark.parametrize(("dtype", "splits"), [(torch.bfloat16, 1), (torch.float32, 6)])
@pytest.mark.parametrize("tile", tiles(), ids=str)
def test_a_hundred_runs_are_one(tile: DenseTile, dtype: torch.dtype, splits: int):
    """A race between copies, tensor cores and those who add shows as a moving result."""
    drawn = draw_dense(GPU, 2784, 6144, 2 * tile.rows - 3)
    first = triton_dense.product(drawn.x, drawn.weight, tile, splits, dtype)
    check(drawn, first)
    for _ in range(100):
        dirty_memory(1 << 22)
        y = triton_dense.product(drawn.x, drawn.weight, tile, splits, dtype)
        assert torch.equal(y, first)


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


def test_rows_that_do_not_follow_one_another():
    drawn = draw_dense(GPU, 4352, 6144, 5)
    wide = torch.cat([drawn.x, drawn.x], dim=1)
    y = triton_dense.run(wide[:, :6144], drawn.weight, torch.float32)
    assert torch.equal(y, triton_dense.run(drawn.x, drawn.weight, torch.float32))


def test_a_matrix_where_the_copy_engine_cannot_read():
    """Its first number is 2 bytes from where 16 bytes begin."""
    drawn = draw_dense(GPU, 208, 2048, 5)
    memory = torch.zeros(208 * 2048 + 1, dtype=torch.bfloat16, device=GPU)[1:]
    shifted = memory.view(208, 2048).copy_(drawn.weight.weight)
    weight = DenseLinear(shifted, drawn.weight.arrived)
    for op, dtype in (("linear", torch.bfloat16), ("router", torch.float32)):
        error = relative_error(triton_dense.run(drawn.x, weight, dtype), drawn.expected())
        assert error <= OPS[op].contract.tolerance["bfloat16"]


@pytest.mark.parametrize("num_tokens", [1, 64, 300])
@pytest.mark.parametrize("dtype", TOLERANCE)
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
