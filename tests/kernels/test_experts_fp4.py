"""Four bits on both sides without a Blackwell: interpreted, compiled, decoded on another GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.house.source import ROOT
from tests.kernels.compile_helpers import INTERPRETED_S, compile_launches, run_interpreted
from tests.kernels.experts import draw_experts
from tetrad.core.errors import UnsupportedError
from tetrad.core.hardware import DeviceSnapshot
from tetrad.formats.weights import Nvfp4Weight
from tetrad.kernels import triton_support
from tetrad.kernels.compare import compare
from tetrad.kernels.experts.check_w4a4 import rounding
from tetrad.kernels.experts.fp4_tiles import TILES, Fp4Tile, fitted, operand, tile_for
from tetrad.kernels.experts.reference import DenseExperts
from tetrad.kernels.experts.tiles import shared_bytes_of
from tetrad.kernels.experts.triton_fp4 import (
    CAPABILITIES,
    FROM_TRITON_3_9,
    Fp4Experts,
    _triton_version,
    in_four_bits,
    issued,
    launch,
    prepare,
    why_not,
)
from tetrad.kernels.experts.triton_quantize import RoundedRows
from tetrad.kernels.sort_tokens.reference import run as sort_tokens

pytest.importorskip("triton")

CPU = torch.device("cpu")
SHAPES = [tile for _, tile in TILES]


@pytest.mark.timeout(INTERPRETED_S)
def test_interpreted():
    run_interpreted(Path(__file__).with_name("interpreted_fp4.py"))


def some_rows(count: int, width: int) -> RoundedRows:
    codes = torch.zeros(count, width // 2, dtype=torch.uint8)
    scales = codes.new_zeros(count, width // 16).view(torch.float8_e4m3fn)
    return RoundedRows(codes, scales, torch.ones(count))


@pytest.mark.parametrize("tile", SHAPES, ids=lambda tile: str(tile.rows))
@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"{c[0]}.{c[1]}")
def test_compiled(
    capability: tuple[int, int],
    tile: Fp4Tile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """The instruction for NVFP4 by NVFP4 and no other product; what memory it takes is foreseen."""
    if capability in FROM_TRITON_3_9 and _triton_version() < (3, 9):
        pytest.skip("this Triton ends in an assertion")
    drawn = draw_experts(CPU, experts=2, tokens=4, hidden=1024, width=768)
    weight = prepare(drawn.weight, torch.bfloat16)
    assert isinstance(weight, Fp4Experts)
    tile = fitted(tile, capability)
    rows, tile_expert, _ = sort_tokens(drawn.routed[0], 2, tile.rows, tile.rows)
    hidden = torch.empty(len(rows), 768, dtype=torch.bfloat16)
    by_slot = torch.empty(8, 1024, dtype=torch.bfloat16)

    def both() -> None:
        x, grouped = some_rows(4, 1024), (rows, tile_expert)
        launch(x, weight.gate_up, grouped, hidden, tile, num_slots=2, is_native=True)
        x = some_rows(len(rows), 768)
        launch(x, weight.down, grouped, by_slot, tile, num_slots=None, is_native=True)

    compiled = compile_launches(both, 10 * capability[0] + capability[1], tmp_path, monkeypatch)
    assert len(compiled) == 2
    for kernel in compiled:
        products = set(re.findall(r"(?:tcgen05\.mma|mma\.sync)\.\S+", kernel.ptx))
        assert products
        assert all("kind::mxf4nvf4" in product for product in products), products
        assert kernel.stack_bytes <= MAX_STACK_BYTES
        assert kernel.shared_bytes <= tile.shared_bytes <= shared_bytes_of(capability)


MAX_STACK_BYTES = 32
"""A few words are kept in memory."""


def test_stages_shrink_to_what_a_device_has():
    tile = Fp4Tile(rows=128, stages=4)
    assert fitted(tile, (10, 0)).stages == 4
    assert fitted(tile, (12, 0)).stages == 3
    assert tile_for(100_000, 32, (12, 0)).rows == 128
    assert tile_for(8, 32, (12, 0)).rows == 16


def test_what_cannot_fit_is_refused_before_it_is_compiled():
    """99 KB on capability 12, 227 KB on 10."""
    tile = Fp4Tile(rows=256)
    assert fitted(tile, (10, 0)) == tile
    with pytest.raises(UnsupportedError, match=r"256 tokens .* 12\.0 has 101376; a smaller tile"):
        fitted(tile, (12, 0))


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_tile_of_the_table_fits(capability: tuple[int, int]):
    sizes = [fitted(tile, capability).shared_bytes for tile in SHAPES]
    assert max(sizes) <= shared_bytes_of(capability)
    assert f"{max(sizes)} bytes of shared memory" in (ROOT / "docs" / "kernels.md").read_text()


def test_tiles_hold_every_row_where_it_is_said_to_lie():
    stored = draw_experts(CPU, experts=2, hidden=288, width=80).weight
    assert isinstance(stored.gate, Nvfp4Weight)
    assert isinstance(stored.up, Nvfp4Weight)
    tiles = operand(stored.gate, stored.up)
    assert tiles.codes.shape == (2, 2, 2, 128, 128)
    assert (tiles.width, tiles.features) == (512, 80)
    for feature, byte in ((0, 0), (9, 127), (63, 5), (64, 128), (79, 143)):
        tile, row = divmod(feature, 64)
        step, column = divmod(byte, 128)
        first = row // 8 * 16 + row % 8
        found = tiles.codes[1, tile, step, [first, first + 8], column].tolist()
        assert found == [stored.gate.codes[1, feature, byte], stored.up.codes[1, feature, byte]]
    assert int(tiles.codes[:, 1, :, 32:].sum()) == 0


def test_what_is_issued_is_whole_tiles(monkeypatch: pytest.MonkeyPatch):
    """Two experts with 1 and 17 rows, a dropped one, tiles of 16 rows and 128 x 256 weights."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (10, 0))
    stored = draw_experts(CPU, experts=2, hidden=288, width=80).weight
    weight = prepare(stored, torch.bfloat16)
    ids = torch.tensor([-1, 0, *[1] * 17])[:, None]
    tiles = 2 * 2 + 3 * 1  # gate and up: 2 x 2; down: 3 x 1
    assert issued({"ids": ids, "weight": weight}) == (16 + 32) * 2 * tiles * 128 * 256
    assert issued({"ids": ids, "weight": prepare(stored, torch.float32)}) is None


def test_what_is_not_accepted_stays_with_torch():
    stored = draw_experts(CPU, format_name="bf16").weight
    assert isinstance(prepare(stored, torch.bfloat16), DenseExperts)
    assert isinstance(prepare(draw_experts(CPU).weight, torch.float32), DenseExperts)


def test_why_not(monkeypatch: pytest.MonkeyPatch):
    def here(*capability: int) -> DeviceSnapshot:
        return DeviceSnapshot("GPU", "cuda", (capability[0], capability[1]), 1 << 36, 100)

    monkeypatch.setattr(triton_support, "triton", object())
    monkeypatch.setattr("importlib.metadata.version", lambda _name: "3.6.0")
    assert why_not(here(10, 0)) is None
    assert "Triton 3.6 does not compile" in str(why_not(here(12, 1)))
    assert "this GPU has 9.0; 'triton' is for" in str(why_not(here(9, 0)))
    monkeypatch.setattr("importlib.metadata.version", lambda _name: "3.9.0+git1")
    assert why_not(here(12, 1)) is None


NATIVE = [pytest.param(False, id="decoded"), pytest.param(True, id="native")]


@pytest.mark.gpu
@pytest.mark.parametrize("is_native", NATIVE)
@pytest.mark.parametrize("tile", SHAPES, ids=lambda tile: str(tile.rows))
def test_on_a_gpu(tile: Fp4Tile, is_native: bool):
    """Decoded, any GPU with E4M3 can run it. Before Blackwell, Triton 3.9 compiles the native form
    too: it decodes by itself."""
    place = torch.device("cuda")
    capability = torch.cuda.get_device_capability()
    if capability < (8, 9):
        pytest.skip("the GPU has no E4M3")
    if is_native and capability not in CAPABILITIES and _triton_version() < (3, 9):
        pytest.skip("this Triton compiles the instruction for Blackwell alone")
    if not is_native and tile.rows > 16:
        pytest.skip("decoded, larger tiles spill and compile for minutes")
    drawn = draw_experts(place, experts=8, tokens=tile.rows, hidden=1024, width=512, dropped=0.1)
    weight = prepare(drawn.weight, torch.bfloat16)
    assert isinstance(weight, Fp4Experts)
    ids, slot_weights, shared, residual = drawn.routed
    arguments = {"x": drawn.x, "weight": drawn.weight, "ids": ids, "slot_weights": slot_weights}
    check = rounding(None)
    (truth,) = check.expected(arguments | {"shared": shared, "residual": residual})
    y = in_four_bits(drawn.x, weight, drawn.routed, tile, is_native=is_native)
    result = compare(y, truth)
    assert result.passes(check.tolerance["bfloat16"]), result
