"""The attention kernels without a GPU: interpreted, and compiled for GPUs that are not there."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.compile_helpers import (
    CAPABILITIES,
    INTERPRETED_S,
    Compiled,
    compile_launches,
    run_interpreted,
)
from tests.kernels.mla import SMALL_CASES, drawn, glm_case, with_lengths_elsewhere
from tetrad.core.errors import UnsupportedError
from tetrad.core.keys import ACTIVATION, FP8, KeyFormat
from tetrad.kernels.experts.tiles import shared_bytes_of
from tetrad.kernels.mla import triton as mla_triton
from tetrad.kernels.mla.tiles import (
    HOPPER_NARROW,
    MIDDLE,
    NARROW,
    WIDE,
    MlaTile,
    fitted,
    splits_for,
    tile_for,
)
from tetrad.kernels.triton_support import triton

pytest.importorskip("triton")

CPU = torch.device("cpu")
WIDTH = 512 + 64
H200_CORES = 132
NEW_COMPILER = tuple(map(int, triton.__version__.split(".")[:2])) > (3, 6)


@pytest.mark.timeout(INTERPRETED_S)
def test_interpreted():
    run_interpreted(Path(__file__).with_name("interpreted_mla.py"))


def compiled(
    inputs: dict[str, Any],
    splits: int,
    capability: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[list[Compiled], MlaTile]:
    """The kernels of a call, and its tile."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    device = divmod(capability, 10)
    is_fp8 = inputs["pool"].dtype == torch.uint8
    tile = fitted(tile_for(inputs["queries"].shape[1], device, is_fp8), WIDTH, device)
    kernels = compile_launches(
        lambda: mla_triton.attend(**inputs, tile=tile, num_splits=splits),
        capability, folder, monkeypatch,
    )  # fmt: skip
    return kernels, tile


def glm_inputs(
    heads: int, topk: int, num_rows: int = 2, kv_len: int = 70, keys: KeyFormat = ACTIVATION
) -> dict[str, Any]:
    case = glm_case("compiled", ((1, kv_len),) * num_rows, topk, heads, keys)
    return drawn(case, CPU, torch.bfloat16)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("topk", [0, 2048])
@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("keys", [ACTIVATION, FP8])
def test_compiles_and_fits(
    keys: KeyFormat,
    heads: int,
    topk: int,
    splits: int,
    capability: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Nothing spills, but where a newer compiler than Triton 3.6 is at the limit of registers. An
    atomic would make the order of sums vary."""
    inputs = glm_inputs(heads, topk, keys=keys)
    kernels, tile = compiled(inputs, splits, capability, tmp_path, monkeypatch)
    assert len(kernels) == (2 if splits > 1 else 1)
    attend = kernels[0]
    is_full = tile.heads == WIDE.heads and NEW_COMPILER
    # ptxas stops at 128 registers on 8.0, and puts an address or two aside
    few = 16 if capability == 80 and keys == FP8 else 0
    assert attend.stack_bytes <= (512 if is_full else few)
    assert attend.shared_bytes <= tile.shared_bytes(WIDTH)
    assert tile.shared_bytes(WIDTH) <= shared_bytes_of(divmod(capability, 10))
    for kernel in kernels:
        assert not re.search(r"\b(atom|red)\.", kernel.ptx), kernel.name
    for kernel in kernels[1:]:
        assert kernel.stack_bytes == 0
        assert kernel.shared_bytes <= 48 << 10
    assert ("wgmma" if tile == WIDE else "mma.sync") in attend.ptx
    assert "cvt.rn.f16x2.e4m3x2" not in attend.ptx


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_width_compiles(capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for case in SMALL_CASES:
        inputs = drawn(case, CPU, torch.bfloat16)
        assert len(compiled(inputs, 2, capability, tmp_path, monkeypatch)[0]) == 2


@pytest.mark.parametrize("topk", [0, 2048])
def test_hopper_waits(topk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every wgmma is waited for before registers that it reads are written again, and all warps
    meet between the last that may read a buffer and the copy that fills it again."""
    (kernel,), _ = compiled(glm_inputs(64, topk), 1, 90, tmp_path, monkeypatch)
    assert set(re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", kernel.ptx)) == {"0"}
    left = re.findall(r"wgmma\.mma_async\.\S*?(m64n\d+)k16\S+\s+\{[^}]*\},\s*(\S)", kernel.ptx)
    assert {shape for shape, operand in left if operand == "{"} == {"m64n256"}
    loop = kernel.ptx[kernel.ptx.index("$L__BB0_2:") :]
    loop = loop[: loop.index("bra")]
    last_wait = loop.rindex("wgmma.wait_group")
    copy = loop.index("cp.async.cg")
    assert "m64n256" in loop[last_wait:copy]
    assert "bar.sync" in loop[last_wait:copy]


@pytest.mark.parametrize("topk", [0, 2048])
def test_hopper_waits_with_fp8_keys(topk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As above; decoded keys are fenced before wgmma reads them from shared memory."""
    (kernel,), _ = compiled(glm_inputs(64, topk, keys=FP8), 1, 90, tmp_path, monkeypatch)
    assert set(re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", kernel.ptx)) == {"0"}
    decoding = kernel.ptx.index("prmt.b32 pair")
    assert "fence.proxy.async" in kernel.ptx[decoding : kernel.ptx.index("wgmma.mma", decoding)]


@pytest.mark.parametrize("topk", [0, 2048])
def test_a_kernel_compiles_once_for_all_lengths_and_steps(
    topk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A step of another size, or one whose lengths lie elsewhere in memory, must not wait for a
    compiler."""
    for num_rows, kv_len in ((2, 64), (3, 65), (16, 1000), (16, 1024)):
        inputs = glm_inputs(8, topk, num_rows, kv_len)
        compiled(inputs, 4, 90, tmp_path, monkeypatch)
        compiled(with_lengths_elsewhere(inputs), 4, 90, tmp_path, monkeypatch)
    assert len(list(tmp_path.glob("*.cubin"))) == 2
    for num_rows, kv_len in ((2, 64), (16, 1000)):
        inputs = glm_inputs(8, topk, num_rows, kv_len, FP8)
        compiled(inputs, 4, 90, tmp_path, monkeypatch)
    assert len(list(tmp_path.glob("*.cubin"))) == 3


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("num_heads", [1, 8, 16, 20, 32, 64, 128])
def test_every_model_has_a_tile_that_fits(num_heads: int, capability: tuple[int, int]):
    tile = tile_for(num_heads, capability)
    assert fitted(tile, WIDTH, capability) == tile
    assert fitted(tile, 1024 + 64, capability).heads >= 16


def test_wide_keys_come_in_smaller_tiles_and_the_widest_are_refused():
    assert fitted(WIDE, 1024, (9, 0)) == replace(WIDE, keys=16)
    assert fitted(MIDDLE, 1088, (12, 0)) == replace(MIDDLE, heads=16, keys=16)
    with pytest.raises(UnsupportedError, match=r"needs 135168 bytes .* 12\.0 has 101376; --att"):
        fitted(MIDDLE, 2048, (12, 0))


@pytest.mark.parametrize(
    ("num_rows", "splits"), [(1, 32), (8, 16), (32, 4), (64, 2), (128, 1), (256, 1), (8192, 1)]
)
def test_splits_of_a_decode_fill_the_gpu(num_rows: int, splits: int):
    """GLM-5 on an H200: 64 heads, 2048 keys."""
    assert splits_for(WIDE, num_rows, 64, 2048, H200_CORES) == splits


@pytest.mark.parametrize(("num_rows", "splits"), [(32, 8), (64, 4), (256, 1)])
def test_eight_heads_leave_room_for_two_programs(num_rows: int, splits: int):
    assert splits_for(HOPPER_NARROW, num_rows, 8, 2048, H200_CORES) == splits


def test_short_contexts_and_small_gpus_do_not_split():
    assert splits_for(WIDE, 1, 64, 64, H200_CORES) == 1
    assert splits_for(NARROW, 1, 8, 2048, 1) == 1
