"""The dense kernel without a GPU: interpreted, and compiled for GPUs that are not there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.kernels.compile_helpers import (
    CAPABILITIES,
    INTERPRETED_S,
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
    HOPPER_STEPS,
    LEAST_COLUMNS,
    SMALL_BYTES,
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
EVERY_TILE = list(dict.fromkeys(tile for step in HOPPER_STEPS for tile in (step.small, step.large)))
TILE = DenseTile(64, 16, 128, stages=3)
"""Small enough for every GPU that has a copy engine."""


@pytest.mark.timeout(INTERPRETED_S)
def test_interpreted():
    run_interpreted(Path(__file__).with_name("interpreted_dense.py"))


def compiled(
    tile: DenseTile,
    splits: int,
    capability: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    width: int = 4096,
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
    """wgmma with both operands from shared memory, where the copy engine puts them; one step's
    products run under the next step's arrival."""
    kernel = compiled(tile, splits, 90, tmp_path, monkeypatch, dtype=dtype)
    left_operands = re.findall(r"wgmma\.mma_async\S+\s+\{[^}]*\},\s*(\S)", kernel.ptx)
    assert left_operands
    assert set(left_operands) == {"%"}
    assert set(re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", kernel.ptx)) == {"0", "1"}
    assert "mma.sync" not in kernel.ptx
    assert "cp.async.bulk.tensor" in kernel.ptx
    assert "cp.async.cg" not in kernel.ptx
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
        if copy := re.search(r"cp\.async\.bulk", after):
            assert "bar.sync" in after[: copy.start()]


@pytest.mark.parametrize("capability", [c for c in CAPABILITIES if c > 90])
@pytest.mark.parametrize("splits", [1, 4])
def test_blackwell(splits: int, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Ampere has no copy engine."""
    kernel = compiled(TILE, splits, capability, tmp_path, monkeypatch, width=1000)
    assert ("tcgen05.mma" if capability == 100 else "mma.sync") in kernel.ptx
    assert "cp.async.bulk.tensor" in kernel.ptx
    assert kernel.shared_bytes <= shared_bytes_of(divmod(capability, 10))


def test_the_order_of_a_sum_hangs_on_no_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One counts who is there, after a barrier that follows every part's store; none adds numbers.
    Parts are read past the L1 cache."""
    kernel = compiled(TILE, 4, 90, tmp_path, monkeypatch)
    assert re.findall(r"\b(?:atom|red)\.\S*", kernel.ptx) == ["atom.global.gpu.acq_rel.add.u32"]
    before, after = kernel.ptx.split("atom.global.gpu.acq_rel.add.u32")
    assert "bar.sync" in before[before.rindex("st.global") :]
    assert "bar.sync" in after[: after.index("ld.global")]
    assert set(re.findall(r"ld\.global\S*", after)) == {"ld.global.cg.v4.b32"}


def test_a_kernel_compiles_once_for_the_steps_of_a_tile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    texts = {
        compiled(TILE, 2, 90, tmp_path, monkeypatch, num_tokens=num_tokens).ptx
        for num_tokens in (1, 3, 8, 16)
    }
    assert len(texts) == 1


def test_the_table_rises_and_leaves_the_rest_to_cublas():
    limits = [step.most_tokens for step in HOPPER_STEPS]
    assert limits == sorted(limits)
    for step in HOPPER_STEPS:
        assert tile_for(step.most_tokens, SMALL_BYTES, (9, 0)) == step.small
        assert tile_for(step.most_tokens, SMALL_BYTES + 1, (9, 0)) == step.large
        assert min(step.small.rows, step.large.rows) >= step.most_tokens, "weights are read once"
    assert tile_for(limits[-1] + 1, 1, (9, 0)) is None
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        assert tile_for(1, 1, capability) is None


@pytest.mark.parametrize("tile", EVERY_TILE, ids=str)
def test_tiles_fit_hopper_and_keep_its_memory_busy(tile: DenseTile):
    """A multiprocessor needs some 40 KB of weights on their way to stream at full speed."""
    assert tile.shared_bytes <= shared_bytes_of((9, 0))
    on_their_way = (tile.stages - 1) * tile.features * tile.columns * 2
    assert tile.at_once((9, 0)) * on_their_way >= 40_000


@pytest.mark.parametrize(("out", "width"), GLM_MATRICES)
@pytest.mark.parametrize("num_tokens", [1, 8, 16, 32, 64])
def test_all_programs_of_a_split_sum_run_at_once(out: int, width: int, num_tokens: int):
    tile = tile_for(num_tokens, out * width * 2, (9, 0))
    assert tile is not None
    at_once = tile.at_once((9, 0))
    splits = splits_for(tile, num_tokens, out, width, H200_CORES, at_once)
    steps = -(-width // tile.columns)
    assert 1 <= splits <= min(MOST_SPLITS, steps)
    assert (splits - 1) * -(-steps // splits) < steps, "no part is empty"
    programs = splits * -(-out // tile.features) * -(-num_tokens // tile.rows)
    assert splits == 1 or programs <= at_once * H200_CORES
    assert splits == 1 or width / splits >= LEAST_COLUMNS


def test_large_matrices_and_small_gpus_do_not_split():
    assert splits_for(TILE, 1, 154880, 6144, H200_CORES, 2) == 1
    assert splits_for(TILE, 1, 6144, 6144, 1, 2) == 1


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
    for num_tokens in (0, HOPPER_STEPS[-1].most_tokens + 1):
        x = torch.randn(num_tokens, 16).bfloat16()
        assert torch.equal(linear_triton.run(x, weight), x[:, :8])
