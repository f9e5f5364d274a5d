"""FP8 experts without a GPU: compiled as `grouped` launches them, prepared, or left to torch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.kernels.compile_helpers import CAPABILITIES, ptxas_complaints
from tests.kernels.experts import draw_experts, random_stack
from tests.kernels.test_experts_triton import compile_both
from tetrad.kernels.experts import gluon as gluon_backend
from tetrad.kernels.experts import triton as triton_backend
from tetrad.kernels.experts.prepared import GroupedExperts, prepare
from tetrad.kernels.experts.tiles import fitted, shared_bytes_of, triton_tiles
from tetrad.kernels.experts.weights import ExpertWeights

pytest.importorskip("triton")

CPU = torch.device("cpu")
INSTRUCTIONS = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("index", range(4))
def test_compiles_without_spilling(
    capability: int, index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """On Hopper with weights in registers, which wait for each wgmma before they change."""
    device = divmod(capability, 10)
    tile = triton_tiles(device)[index][1]
    bound = fitted(tile, 8, device, is_packed=False).shared_bytes(device, is_packed=False)
    kernels = compile_both(
        triton_backend.grouped, tile, capability, tmp_path, monkeypatch, "fp8_block"
    )
    assert len(kernels) == 2
    for kernel in kernels:
        assert INSTRUCTIONS[capability] in kernel.ptx
        assert kernel.stack_bytes == 0
        assert kernel.shared_bytes <= bound <= shared_bytes_of(device)
        if capability == 90:
            waits = re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", kernel.ptx)
            left = re.findall(r"wgmma\.mma_async\S+\s+\{[^}]*\},\s*(\S)", kernel.ptx)
            assert set(waits) == {"0"}
            assert set(left) == {"{"}
            assert not ptxas_complaints(kernel, tmp_path)


def stacks(gate: str, up: str, down: str) -> ExpertWeights:
    generator = torch.Generator().manual_seed(0)
    return ExpertWeights(
        random_stack(gate, 2, 128, 256, generator),
        random_stack(up, 2, 128, 256, generator),
        random_stack(down, 2, 256, 128, generator),
    )


@pytest.mark.parametrize("formats", [("fp8_block",) * 3, ("nvfp4", "nvfp4", "fp8_tensor")])
def test_weights_stay_in_eight_bits(formats: tuple[str, str, str]):
    weight = stacks(*formats)
    prepared = prepare(weight, torch.bfloat16)
    assert isinstance(prepared, GroupedExperts)
    assert [prepared.gate_up.is_fp8, prepared.down.is_fp8] == [formats[0] == "fp8_block", True]
    scales = 4 * 2 * (4 * 2 + 2 * 1)
    counter = prepared.gate_up.arrived  # of programs that share a tile
    assert (counter is None) == (formats[0] == "fp8_block")
    counted = 0 if counter is None else counter.nbytes
    assert prepared.nbytes - weight.nbytes - counted <= scales


def test_gate_and_up_in_different_formats_stay_with_torch():
    assert not isinstance(
        prepare(stacks("fp8_block", "fp8_tensor", "nvfp4"), torch.bfloat16), GroupedExperts
    )


def test_gluon_leaves_them_to_the_portable_kernel():
    drawn = draw_experts(CPU, hidden=512, width=384, format_name="fp8_block")
    assert gluon_backend.tile_of(drawn.routed[0], drawn.prepared) is None
