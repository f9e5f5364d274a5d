"""The dense kernel without a GPU: interpreted, and compiled for GPUs that are not there."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch

from tests.kernels.compile_helpers import (
    CAPABILITIES,
    Compiled,
    compile_launches,
    ptxas_complaints,
    run_interpreted,
)
from tetrad.formats.weights import DenseWeight, Nvfp4Weight
from tetrad.kernels.experts.tiles import shared_bytes_of
from tetrad.kernels.linear import triton as linear_triton
from tetrad.kernels.linear import triton_dense
from tetrad.kernels.linear.dense_tiles import (
    HOPPER_TILES,
    DenseTile,
    splits_for,
    tile_for,
)
from tetrad.kernels.linear.tiles import MOST_SPLITS
from tetrad.kernels.linear.triton_dense import DenseLinear
from tetrad.kernels.registry import OPS

pytest.importorskip("triton")

H200_CORES = 132
GLM_MATRICES = ((2784, 6144), (16384, 2048), (6144, 16384), (4352, 6144), (6144, 2048))
BULK = DenseTile(64, 16, 128, stages=5, is_bulk=True)
BY_THREADS = DenseTile(64, 16, 128, stages=3, is_bulk=False)
EVERY_TILE = [*(tile for _, tile in HOPPER_TILES), BULK, BY_THREADS]


def test_interpreted():
    run_interpreted(Path(__file__).with_name("interpreted_dense.py"))


def compiled(
    tile: DenseTile,
    splits: int,
    capability: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    width: int = 1024,
    num_tokens: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Compiled:
    """The kernel of a step that fills a tile."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    weight = DenseLinear.of(torch.zeros(208, width, dtype=torch.bfloat16))
    x = torch.zeros(num_tokens or tile.rows, width, dtype=torch.bfloat16)
    (kernel,) = compile_launches(
        lambda: triton_dense.product(x, weight, tile, splits, dtype),
        capability, folder, monkeypatch,
    )  # fmt: skip
    return kernel


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("tile", EVERY_TILE, ids=str)
def test_hopper(
    tile: DenseTile,
    splits: int,
    dtype: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """wgmma with both operands from shared memory, where copies put them that no thread waits for;
    one step's products run under the next step's arrival."""
    kernel = compiled(tile, splits, 90, tmp_path, monkeypatch, dtype=dtype)
    left_operands = re.findall(r"wgmma\.mma_async\S+\s+\{[^}]*\},\s*(\S)", kernel.ptx)
    assert left_operands
    assert set(left_operands) == {"%"}
    assert set(re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", kernel.ptx)) == {"0", "1"}
    assert "mma.sync" not in kernel.ptx
    assert ("cp.async.bulk.tensor" in kernel.ptx) == tile.is_bulk
    assert ("cp.async.cg.shared.global" in kernel.ptx) == (not tile.is_bulk)
    assert not ptxas_complaints(kernel, tmp_path)
    assert kernel.stack_bytes == 0
    assert kernel.shared_bytes <= tile.shared_bytes <= shared_bytes_of((9, 0))


@pytest.mark.parametrize("tile", EVERY_TILE, ids=str)
def test_no_copy_overwrites_what_is_multiplied(
    tile: DenseTile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A warp waits for its own part of a product alone, so all must have met before the copies that
    refill the buffers."""
    kernel = compiled(tile, 1, 90, tmp_path, monkeypatch)
    for after in kernel.ptx.split("wgmma.wait_group.sync.aligned")[1:]:
        if copy := re.search(r"cp\.async\.(cg|bulk)", after):
            assert "bar.sync" in after[: copy.start()]


@pytest.mark.parametrize("capability", [c for c in CAPABILITIES if c != 90])
@pytest.mark.parametrize("splits", [1, 4])
def test_other_gpus(splits: int, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kernel = compiled(BY_THREADS, splits, capability, tmp_path, monkeypatch)
    assert ("tcgen05.mma" if capability == 100 else "mma.sync") in kernel.ptx
    assert "cp.async.cg.shared.global" in kernel.ptx
    assert kernel.stack_bytes == 0
    assert kernel.shared_bytes <= shared_bytes_of(divmod(capability, 10))


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("width", [1000, 997])
def test_odd_widths_compile(
    width: int, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The copy engine cannot take rows of 997 numbers: threads do."""
    kernel = compiled(BULK, 2, capability, tmp_path, monkeypatch, width)
    can_be_bulk = width % 8 == 0 and capability >= 90
    assert ("cp.async.bulk.tensor" in kernel.ptx) == can_be_bulk


def test_the_order_of_a_sum_hangs_on_no_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One counts who is there, after a barrier that follows every part's store; none adds numbers.
    Parts are read past the L1 cache."""
    kernel = compiled(BULK, 4, 90, tmp_path, monkeypatch)
    assert re.findall(r"\b(?:atom|red)\.\S*", kernel.ptx) == ["atom.global.gpu.acq_rel.add.u32"]
    before, after = kernel.ptx.split("atom.global.gpu.acq_rel.add.u32")
    assert "bar.sync" in before[before.rindex("st.global") :]
    assert "bar.sync" in after[: after.index("ld.global")]
    assert set(re.findall(r"ld\.global\S*", after)) == {"ld.global.cg.v4.b32"}


def test_only_the_cache_is_asked_before_the_kernel_before_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Nothing is read or written before the wait."""
    ahead = replace(BULK, ahead=256)
    ptx = compiled(ahead, 2, 90, tmp_path, monkeypatch).ptx
    early, late = ptx.split("griddepcontrol.wait")
    assert early.index("griddepcontrol.launch_dependents") < early.index(
        "cp.async.bulk.prefetch.L2.global"
    )
    for access in (r"ld\.global", r"st\.global", r"atom\.", r"cp\.async\.bulk\.tensor"):
        assert not re.search(access, early)
        assert re.search(access, late)
    for tile, width in ((BULK, 1024), (ahead, 1000)):
        assert "griddepcontrol" not in compiled(tile, 2, 90, tmp_path, monkeypatch, width).ptx


def test_a_kernel_compiles_once_for_the_steps_of_a_tile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    texts = {
        compiled(BULK, 2, 90, tmp_path, monkeypatch, num_tokens=num_tokens).ptx
        for num_tokens in (1, 3, 8, 16)
    }
    assert len(texts) == 1


def test_the_table_rises_and_fits_hopper_and_leaves_the_rest_to_cublas():
    limits = [limit for limit, _ in HOPPER_TILES]
    assert limits == sorted(limits)
    for limit, tile in HOPPER_TILES:
        assert tile_for(limit, (9, 0)) == tile
        assert tile.shared_bytes <= shared_bytes_of((9, 0))
        assert tile.at_once((9, 0)) >= 1
    assert tile_for(limits[-1] + 1, (9, 0)) is None
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        assert tile_for(1, capability) is None


def test_bytes_in_flight():
    """A multiprocessor needs some 40 KB of weights on their way to stream at full speed."""
    for _, tile in HOPPER_TILES:
        ahead = (tile.stages - 1) * tile.features * tile.columns * 2
        assert tile.at_once((9, 0)) * ahead >= 40_000


@pytest.mark.parametrize(("out", "width"), GLM_MATRICES)
@pytest.mark.parametrize("num_tokens", [1, 8, 16, 32, 64])
def test_all_programs_of_a_split_sum_run_at_once(out: int, width: int, num_tokens: int):
    tile = tile_for(num_tokens, (9, 0))
    assert tile is not None
    at_once = tile.at_once((9, 0))
    splits = splits_for(tile, num_tokens, out, width, H200_CORES, at_once)
    steps = -(-width // tile.columns)
    assert 1 <= splits <= min(MOST_SPLITS, steps)
    assert (splits - 1) * -(-steps // splits) < steps, "no part is empty"
    programs = splits * -(-out // tile.features) * -(-num_tokens // tile.rows)
    assert splits == 1 or programs <= at_once * H200_CORES


def test_large_matrices_and_small_gpus_do_not_split():
    tile = HOPPER_TILES[0][1]
    assert splits_for(tile, 1, 154880, 6144, H200_CORES, 2) == 1
    assert splits_for(tile, 1, 6144, 6144, 1, 2) == 1


@pytest.mark.parametrize("op", ["linear", "router"])
def test_dense_weights_are_not_copied(op: str):
    stored = torch.ones(8, 16, dtype=torch.bfloat16)
    prepared = OPS[op].backends["triton"].prepare(DenseWeight(stored), torch.bfloat16)
    assert isinstance(prepared, DenseLinear)
    assert prepared.weight.data_ptr() == stored.data_ptr()
    assert prepared.nbytes == stored.nbytes + prepared.arrived.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_activations_stay_with_torch(dtype: torch.dtype):
    weight = DenseWeight(torch.ones(4, 4, dtype=torch.bfloat16))
    for op, kept in (("linear", dtype), ("router", torch.float32)):
        prepared = OPS[op].backends["triton"].prepare(weight, dtype)
        assert isinstance(prepared, DenseWeight)
        assert prepared.data.dtype == kept


def test_a_router_that_bf16_cannot_hold_is_not_rounded():
    for weight in (
        DenseWeight(torch.ones(4, 4)),
        Nvfp4Weight(
            torch.zeros(4, 8, dtype=torch.uint8),
            torch.ones(4, 1).to(torch.float8_e4m3fn),
            torch.ones(()),
        ),
    ):
        prepared = OPS["router"].backends["triton"].prepare(weight, torch.bfloat16)
        assert isinstance(prepared, DenseWeight)
        assert prepared.data.dtype == torch.float32


def test_large_steps_and_unmeasured_gpus_go_to_cublas(monkeypatch: pytest.MonkeyPatch):
    """In torch's words; on a CPU, which knows no product of bf16 with an fp32 result."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (12, 0))
    weight = linear_triton.prepare(DenseWeight(torch.eye(8, 16)), torch.bfloat16)
    x = torch.randn(3, 16).bfloat16()
    assert torch.equal(linear_triton.run(x, weight), x[:, :8])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    for num_tokens in chain((0,), [limit + 1 for limit, _ in HOPPER_TILES[-1:]]):
        x = torch.randn(num_tokens, 16).bfloat16()
        assert torch.equal(linear_triton.run(x, weight), x[:, :8])
