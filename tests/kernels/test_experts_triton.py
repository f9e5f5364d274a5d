"""Grouped products without a GPU: interpreted, and compiled for GPUs that are not there."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
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
from tests.kernels.experts import draw_experts
from tests.kernels.test_experts_packing import drawn as drawn_stack
from tetrad.core.errors import UnsupportedError
from tetrad.kernels.experts import gluon as gluon_backend
from tetrad.kernels.experts import triton as triton_backend
from tetrad.kernels.experts import triton_packing
from tetrad.kernels.experts.grouping import Grouping
from tetrad.kernels.experts.tiles import (
    GLUON_PARTS,
    GLUON_TILES,
    TRITON_HOPPER_TILES,
    TRITON_OTHER_TILES,
    Tiles,
    TileShape,
    fitted,
    shared_bytes_of,
    tile_for,
)
from tetrad.kernels.sort_tokens.reference import run as sort_tokens

pytest.importorskip("triton")

TRITON_SHAPES = [tile for _, tile in TRITON_HOPPER_TILES]
OTHER_SHAPES = [tile for _, tile in TRITON_OTHER_TILES]
GLUON_SHAPES = dict.fromkeys(tile for _, tile in GLUON_TILES)
IN_PARTS = [replace(GLUON_TILES[0][1], parts=parts) for _, parts in GLUON_PARTS]
HOPPER_CASES = [
    *(pytest.param(triton_backend.grouped, t, id=f"triton-{t.block}") for t in TRITON_SHAPES),
    *(pytest.param(gluon_backend.grouped, t, id=f"gluon-{t.block}") for t in GLUON_SHAPES),
    *(pytest.param(gluon_backend.grouped, t, id=f"gluon-16x{t.parts}") for t in IN_PARTS),
]
OTHER_CASES = [
    pytest.param(capability, tile, id=f"{capability}-{tile.block}")
    for capability in CAPABILITIES
    if capability != 90
    for tile in OTHER_SHAPES
]


@pytest.mark.timeout(INTERPRETED_S)
def test_interpreted():
    run_interpreted(Path(__file__).with_name("interpreted_experts.py"))


def compile_both(
    product: Callable[..., None],
    tile: TileShape,
    capability: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    format_name: str = "nvfp4",
) -> list[Compiled]:
    """gate_up and down of a small model, as `grouped` launches them."""
    drawn = draw_experts(
        torch.device("cpu"), experts=2, tokens=4, hidden=512, width=384, format_name=format_name
    )
    rows = sort_tokens(drawn.routed[0], 2, tile.block, tile.small_block)
    grouping = Grouping(*rows, 2, tile, (capability // 10, 0), num_cores=132)
    x = drawn.x.bfloat16()
    hidden = torch.empty(len(grouping.rows), 384, dtype=torch.bfloat16)
    by_slot = torch.empty(8, 512, dtype=torch.bfloat16)

    def launch() -> None:
        product(x, drawn.prepared.gate_up, grouping, hidden, is_gate_up=True)
        product(hidden, drawn.prepared.down, grouping, by_slot, is_gate_up=False)

    return compile_launches(launch, capability, folder, monkeypatch)


@pytest.mark.parametrize(("product", "tile"), HOPPER_CASES)
def test_hopper_keeps_weights_in_registers(
    product: Callable[..., None],
    tile: TileShape,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """wgmma with the left operand in registers, no serialisation, hardly a spill."""
    compiled = compile_both(product, tile, 90, tmp_path, monkeypatch)
    shapes = [shape for shape in (tile, tile.down, tile.rest) if shape]
    assert len(compiled) == (4 if tile.rest else 2)
    for kernel in compiled:
        left_operands = re.findall(r"wgmma\.mma_async\S+\s+\{[^}]*\},\s*(\S)", kernel.ptx)
        assert left_operands
        assert set(left_operands) == {"{"}
        assert "mma.sync" not in kernel.ptx
        assert not ptxas_complaints(kernel, tmp_path)
        assert kernel.stack_bytes <= MAX_STACK_BYTES
        assert kernel.shared_bytes <= max(s.shared_bytes((9, 0), is_packed=True) for s in shapes)


MAX_STACK_BYTES = 256
"""A few words are kept in memory where registers are capped to fit another program, and for tiles
of 144 rows, which on an H200 beat tiles of 128 all the same."""


@pytest.mark.parametrize("tile", TRITON_SHAPES, ids=lambda t: str(t.block))
def test_portable_hopper_kernels_wait_for_every_wgmma(
    tile: TileShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Triton 3.6 alone would let a step overwrite registers that a wgmma still reads."""
    for kernel in compile_both(triton_backend.grouped, tile, 90, tmp_path, monkeypatch):
        assert set(re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", kernel.ptx)) == {"0"}


@pytest.mark.parametrize(("capability", "tile"), OTHER_CASES)
def test_other_gpus(
    capability: int, tile: TileShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    instruction = "tcgen05.mma" if capability == 100 else "mma.sync"
    limit = shared_bytes_of((capability // 10, 0))
    for kernel in compile_both(triton_backend.grouped, tile, capability, tmp_path, monkeypatch):
        assert instruction in kernel.ptx
        assert kernel.stack_bytes == 0
        bound = tile.shared_bytes((capability // 10, 0), is_packed=True)
        assert kernel.shared_bytes <= bound <= limit


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_packing(capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stacks = (drawn_stack(1, 64, 64), drawn_stack(1, 64, 64))
    (kernel,) = compile_launches(
        lambda: triton_packing.launch(stacks), capability, tmp_path, monkeypatch
    )
    assert kernel.stack_bytes == 0


MAX_DENSE_STACK_BYTES = 512
"""The largest tile of dense weights spills under Triton 3.9; it is there to be right."""


@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize("index", range(4))
def test_dense_experts(
    capability: int, index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tile = (TRITON_SHAPES if capability == 90 else OTHER_SHAPES)[index]
    exact = (capability // 10, 0)
    bound = fitted(tile, 8, exact, is_packed=False).shared_bytes(exact, is_packed=False)
    for kernel in compile_both(
        triton_backend.grouped, tile, capability, tmp_path, monkeypatch, "bf16"
    ):
        assert "mma" in kernel.ptx
        assert kernel.stack_bytes <= MAX_DENSE_STACK_BYTES
        assert kernel.shared_bytes <= bound <= shared_bytes_of(exact)


def test_stages_shrink_to_what_a_device_has():
    tile = TileShape(rows=128, columns=128, stages=6)
    assert fitted(tile, 8, (9, 0), is_packed=True).stages == 5
    assert fitted(tile, 8, (8, 0), is_packed=True).stages == 3
    assert fitted(tile, 7, (9, 0), is_packed=True).columns == 64


def test_what_cannot_fit_is_refused_with_both_numbers():
    tile = TileShape(rows=256, columns=128, stages=4)
    with pytest.raises(UnsupportedError, match=r"needs 173056 bytes .* 12\.0 has 101376"):
        fitted(tile, 8, (12, 0), is_packed=True)


@pytest.mark.parametrize("tiles", [TRITON_HOPPER_TILES, TRITON_OTHER_TILES, GLUON_TILES])
def test_every_mean_has_a_tile(tiles: Tiles):
    limits = [limit for limit, _ in tiles]
    assert limits == sorted(limits)
    for mean in (1, *limits[:-1], 100_000):
        assert tile_for(int(mean * 256), 256, tiles) in [tile for _, tile in tiles]
    assert tile_for(8, 256, tiles).block <= 16
    assert tile_for(100_000 * 256, 256, tiles).block >= 128
