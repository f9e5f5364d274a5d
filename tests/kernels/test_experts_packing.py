"""Packed experts give back every code times every scale, read the way the kernel reads them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tetrad.formats import e2m1
from tetrad.formats.weights import Nvfp4Weight
from tetrad.kernels.experts import packing
from tetrad.kernels.experts.packing import UNSCALE, PackedMatrix, pack

WORD = 0xFFFFFFFF


def bf16(bits: Tensor) -> Tensor:
    """The bfloat16 whose bits stand in the low half."""
    return (bits & 0xFFFF).to(torch.int32).to(torch.int16).view(torch.bfloat16)


def as_the_kernel_reads(packed: PackedMatrix) -> Tensor:
    """float64 [E, tiles * 128, granules * 64] by the masks and shifts of `decode_ptx`."""
    experts, tiles, granules, _ = packed.words.shape
    # e, tile, granule, block, g, t, k32, word
    words = packed.words.view(torch.int32).long() & WORD
    even, odd = words.view(experts, tiles, granules, 8, 8, 4, 2, 2).unbind(-1)
    scales = (packed.scales.long() & WORD).view(experts, tiles, granules, 8, 8, 1, 2)
    low = (scales << 4) & 0x0FF00FF0 | 0x70007000
    high = (scales >> 4) & 0x0FF00FF0 | 0x70007000
    scale = [bf16(low), bf16(low >> 16), bf16(high), bf16(high >> 16)]
    pairs = [(word << shift) & 0x81C081C0 for word in (even, odd) for shift in (0, 3, 6)]
    both = even & 0x6C006C00 | (odd >> 5) & (WORD ^ 0x6C006C00)
    pairs.insert(3, (both >> 3) & 0x01C001C0 | (both << 1) & 0x80008000)
    pairs.append((both << 1) & 0x00C000C0 | both & 0x01000100 | (both << 2) & 0x80008000)
    # e, tile, block, row half, g | granule, k32, k16, k half, t, parity
    out = torch.empty(experts, tiles, 8, 2, 8, granules, 2, 2, 2, 4, 2, dtype=torch.float64)
    for number, pair in enumerate(pairs):
        k16, k_half, row_half = number // 4, number // 2 % 2, number % 2
        for parity in (0, 1):
            product = bf16(pair >> 16 * parity) * scale[2 * k16 + row_half]
            in_order = product.permute(0, 1, 3, 4, 2, 6, 5).double()
            out[:, :, :, row_half, :, :, :, k16, k_half, :, parity] = in_order
    return out.view(experts, tiles * 128, granules * 64) * UNSCALE


def unscaled(weight: Nvfp4Weight) -> Tensor:
    """The values without the global scale."""
    ones = torch.ones_like(weight.global_scale)
    return Nvfp4Weight(weight.codes, weight.scales, ones).dequantize(torch.float64)


def drawn(experts: int, rows: int, columns: int, seed: int = 0) -> Nvfp4Weight:
    """Any code, any scale but NaN."""
    generator = torch.Generator().manual_seed(seed)

    def number(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator, dtype=torch.uint8)

    scales = number(127, experts, rows, columns // 16) | number(2, experts, rows, 1) << 7
    return Nvfp4Weight(
        number(256, experts, rows, columns // 2),
        scales.view(torch.float8_e4m3fn),
        torch.rand(experts, generator=generator) + 0.5,
    )


def test_every_code_times_every_scale_is_exact():
    """16 codes by 127 scales and their negatives: subnormals and both zeros are among them."""
    scales = torch.tensor([s for s in range(256) if s & 127 != 127], dtype=torch.uint8)
    codes = e2m1.pack(torch.arange(16, dtype=torch.uint8).expand(1, len(scales), 16))
    weight = Nvfp4Weight(
        codes, scales[None, :, None].contiguous().view(torch.float8_e4m3fn), torch.ones(1)
    )
    expected = unscaled(weight)
    assert len(expected.unique()) > 400
    found = as_the_kernel_reads(pack((weight,)))
    torch.testing.assert_close(found[:, : len(scales), :16], expected, rtol=0, atol=0)


@pytest.mark.parametrize(("rows", "columns"), [(128, 64), (256, 192), (200, 80), (5, 16)])
def test_positions_and_filling(rows: int, columns: int):
    """Each value comes out at its own row and column; what fills the last tile is zero."""
    weight = drawn(3, rows, columns)
    packed = pack((weight,))
    found = as_the_kernel_reads(packed)
    torch.testing.assert_close(found[:, :rows, :columns], unscaled(weight), rtol=0, atol=0)
    assert not found[:, rows:].any()
    assert not found[:, :, columns:].any()
    torch.testing.assert_close(packed.global_scale[:, 0], weight.global_scale * 128)


@pytest.mark.parametrize("rows", [64, 72])
def test_gate_and_up_share_tiles_and_keep_their_global_scales(rows: int):
    gate, up = drawn(2, rows, 64, seed=1), drawn(2, rows, 64, seed=2)
    packed = pack((gate, up))
    by_half = as_the_kernel_reads(packed).view(2, -1, 2, 8, 64)
    for half, weight in enumerate((gate, up)):
        found = by_half[:, :, half].flatten(1, 2)[:, :rows]
        torch.testing.assert_close(found, unscaled(weight), rtol=0, atol=0)
        torch.testing.assert_close(packed.global_scale[:, half], weight.global_scale * 128)


def test_nan_scales_show():
    weight = drawn(1, 16, 64)
    stored = weight.scales.view(torch.uint8).clone()
    stored[0, 3, 1] = 0x7F
    stored[0, 4, 2] = 0xFF
    poisoned = Nvfp4Weight(weight.codes, stored.view(torch.float8_e4m3fn), weight.global_scale)
    found = as_the_kernel_reads(pack((poisoned,)))[:, :16]
    torch.testing.assert_close(found, unscaled(poisoned), rtol=0, atol=0, equal_nan=True)
    assert found.isnan().sum() == 32


def test_packing_in_chunks_is_packing(monkeypatch: pytest.MonkeyPatch):
    weight = drawn(5, 128, 64)
    whole = pack((weight,))
    monkeypatch.setattr(packing, "CHUNK_BYTES", 2 * 128 * 64 // 2)
    pieces = pack((weight,))
    assert torch.equal(whole.words, pieces.words)
    assert torch.equal(whole.scales, pieces.scales)


def test_packed_bytes_are_stored_bytes():
    """Nothing is lost to padding at sizes that fill tiles."""
    weight = drawn(4, 256, 128)
    global_scales = 4 * 4
    assert pack((weight,)).nbytes == weight.nbytes
    assert weight.nbytes == 4 * 256 * 128 * 9 // 16 + global_scales
