"""The linear kernel without a GPU: interpreted, and compiled for GPUs that are not there."""

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
from tests.kernels.linear import draw_linear
from tetrad.core.errors import UnsupportedError
from tetrad.formats.weights import DenseWeight
from tetrad.kernels.experts.tiles import shared_bytes_of
from tetrad.kernels.linear import triton as linear_triton
from tetrad.kernels.linear.packed import PackedLinear
from tetrad.kernels.linear.tiles import (
    FP8_HOPPER_TILES,
    FP8_OTHER_TILES,
    MOST_SPLITS,
    NVFP4_HOPPER_TILES,
    NVFP4_OTHER_TILES,
    LinearTile,
    fitted,
    splits_for,
    tile_for,
)

pytest.importorskip("triton")

CPU = torch.device("cpu")
TOKENS = (16, 32, 64, 200)
"""One for each tile of a table."""
GLM_MATRICES = ((2048, 6144), (6144, 2048), (12288, 6144), (6144, 12288))
H200_CORES = 132


@pytest.mark.timeout(INTERPRETED_S)
def test_interpreted():
    run_interpreted(Path(__file__).with_name("interpreted_linear.py"))


def compiled(
    format_name: str,
    num_tokens: int,
    splits: int,
    capability: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    width: int = 1024,
) -> tuple[Compiled, LinearTile]:
    """The kernel of a step over a small matrix, and its tile."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    packed = draw_linear(CPU, format_name, 256, width, 1).packed
    device = divmod(capability, 10)
    tile = tile_for(num_tokens, device, packed.bits)
    tile = fitted(tile, packed.packed_width, device, packed.bits)
    x = torch.zeros(num_tokens, width, dtype=torch.bfloat16)
    (kernel,) = compile_launches(
        lambda: linear_triton.product(x, packed, tile, splits, device),
        capability, folder, monkeypatch,
    )  # fmt: skip
    return kernel, tile


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("format_name", ["nvfp4", "fp8_block"])
def test_hopper(
    format_name: str, num_tokens: int, splits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """wgmma with weights in registers, which waits for every one of them (Triton 3.6 would let a
    step overwrite registers in use); no spill, no serialisation by ptxas."""
    kernel, tile = compiled(format_name, num_tokens, splits, 90, tmp_path, monkeypatch)
    left_operands = re.findall(r"wgmma\.mma_async\S+\s+\{[^}]*\},\s*(\S)", kernel.ptx)
    assert left_operands
    assert set(left_operands) == {"{"}
    assert set(re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", kernel.ptx)) == {"0"}
    assert "mma.sync" not in kernel.ptx
    assert not ptxas_complaints(kernel, tmp_path)
    assert kernel.stack_bytes == 0
    bits = 4 if format_name == "nvfp4" else 8
    assert kernel.shared_bytes <= tile.shared_bytes((9, 0), bits) <= shared_bytes_of((9, 0))


@pytest.mark.parametrize("capability", [c for c in CAPABILITIES if c != 90])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("format_name", ["nvfp4", "fp8_block"])
def test_other_gpus(
    format_name: str,
    num_tokens: int,
    splits: int,
    capability: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    kernel, tile = compiled(format_name, num_tokens, splits, capability, tmp_path, monkeypatch)
    assert ("tcgen05.mma" if capability == 100 else "mma.sync") in kernel.ptx
    assert kernel.stack_bytes == 0
    device = divmod(capability, 10)
    bits = 4 if format_name == "nvfp4" else 8
    assert kernel.shared_bytes <= tile.shared_bytes(device, bits) <= shared_bytes_of(device)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("format_name", "width"), [("nvfp4", 1008), ("fp8_block", 997)])
def test_odd_widths_compile(
    format_name: str, width: int, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    kernel, _ = compiled(format_name, 16, 2, capability, tmp_path, monkeypatch, width)
    assert kernel.stack_bytes == 0


def test_the_order_of_a_sum_hangs_on_no_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One counts who is there, after a barrier that follows every part's store; none adds numbers.
    Parts are read past the L1 cache."""
    kernel, _ = compiled("nvfp4", 16, 4, 90, tmp_path, monkeypatch)
    assert re.findall(r"\b(?:atom|red)\.\S*", kernel.ptx) == ["atom.global.gpu.acq_rel.add.u32"]
    before, after = kernel.ptx.split("atom.global.gpu.acq_rel.add.u32")
    assert "bar.sync" in before[before.rindex("st.global") :]
    assert "bar.sync" in after[: after.index("ld.global")]
    assert set(re.findall(r"ld\.global\S*", after)) == {"ld.global.cg.v4.b32"}
    alone, _ = compiled("nvfp4", 16, 1, 90, tmp_path, monkeypatch)
    assert not re.search(r"\b(atom|red)\.", alone.ptx)


def test_a_kernel_compiles_once_for_the_steps_of_a_tile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    texts = {compiled("fp8_block", n, 2, 90, tmp_path, monkeypatch)[0].ptx for n in (1, 3, 8, 16)}
    assert len(texts) == 1


def test_stages_shrink_to_what_a_device_has():
    tile = LinearTile(rows=128, columns=128, stages=6)
    assert fitted(tile, 1024, (9, 0), 4).stages == 5
    assert fitted(tile, 1024, (9, 0), 8).stages == 4
    assert fitted(tile, 1024, (8, 0), 8).stages == 3
    assert fitted(tile, 1024 + 64, (9, 0), 4).columns == 64


def test_what_cannot_fit_is_refused_with_both_numbers():
    with pytest.raises(UnsupportedError, match=r"needs 180224 bytes .* 12\.0 has 101376"):
        fitted(LinearTile(rows=256, columns=128, stages=4), 1024, (12, 0), 8)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)], ids=str)
def test_every_step_has_a_tile_that_fits(capability: tuple[int, int], bits: int):
    for num_tokens in (1, 16, 17, 64, 65, 100_000):
        tile = tile_for(num_tokens, capability, bits)
        assert 16 <= tile.rows <= max(16, 2 * num_tokens)
        assert fitted(tile, 6144, capability, bits).stages >= 2
    for tiles in (NVFP4_HOPPER_TILES, FP8_HOPPER_TILES, NVFP4_OTHER_TILES, FP8_OTHER_TILES):
        limits = [limit for limit, _ in tiles]
        assert limits == sorted(limits)


@pytest.mark.parametrize(("out", "width"), GLM_MATRICES)
@pytest.mark.parametrize("num_tokens", [1, 16, 32, 64, 512, 2048])
def test_splits_fill_a_gpu_and_divide_the_work(out: int, width: int, num_tokens: int):
    tile = fitted(tile_for(num_tokens, (9, 0), 4), width, (9, 0), 4)
    splits = splits_for(tile, num_tokens, out // 128, width, H200_CORES, 2)
    assert width // tile.columns % splits == 0
    assert 1 <= splits <= MOST_SPLITS
    programs = splits * (out // 128) * -(-num_tokens // tile.rows)
    assert programs >= 0.7 * H200_CORES
    if splits > 1:
        assert programs <= 3 * H200_CORES


def test_large_steps_and_small_gpus_do_not_split():
    tile = tile_for(4096, (9, 0), 4)
    assert splits_for(tile, 4096, 48, 2048, H200_CORES, 2) == 1
    assert splits_for(tile, 1, 48, 2048, 1, 2) == 1


@pytest.mark.parametrize("format_name", ["nvfp4", "fp8_block", "fp8_tensor"])
def test_packed_weights_take_the_bytes_of_the_checkpoint(format_name: str):
    drawn = draw_linear(CPU, format_name, 256, 1024, 1)
    prepared = linear_triton.prepare(drawn.weight, torch.bfloat16)
    assert isinstance(prepared, PackedLinear)
    assert prepared.nbytes - drawn.weight.nbytes <= 4 * 1024 + 4 * 32


def test_other_activations_stay_with_torch_and_that_is_told(caplog: pytest.LogCaptureFixture):
    linear_triton._tell_once.cache_clear()
    weight = draw_linear(CPU, "nvfp4", 48, 64, 1).weight
    for _ in range(2):
        assert isinstance(linear_triton.prepare(weight, torch.float16), DenseWeight)
    assert caplog.messages == [
        "Quantised linears run on plain torch, many times slower: activations are float16 and not "
        "bfloat16."
    ]
