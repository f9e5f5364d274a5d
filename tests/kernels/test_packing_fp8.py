"""Packed FP8 matrices give back every code, read the way the kernel reads them."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from tetrad.formats.weights import Fp8BlockWeight, Fp8TensorWeight
from tetrad.kernels.experts.decode import decode_fp8_ptx
from tetrad.kernels.experts.packing_fp8 import PackedFp8, pack_fp8

WORD = 0xFFFFFFFF


def bf16(bits: Tensor) -> Tensor:
    """The bfloat16 whose bits stand in the low half."""
    return (bits & 0xFFFF).to(torch.int32).to(torch.int16).view(torch.bfloat16)


def as_the_kernel_reads(packed: PackedFp8) -> Tensor:
    """float64 [E, tiles * 128, columns] by the masks and shifts of `decode_fp8_ptx`, unscaled."""
    experts, tiles, granules, _ = packed.words.shape
    # e, tile, granule, block, g, t, k16, k half
    words = packed.words.view(torch.int32).long() & WORD
    words = words.view(experts, tiles, granules, 8, 8, 4, 2, 2)
    near = words & 0x87F087F0
    far = (words << 4) & 0x80F080F0 | (words >> 4) & 0x07000700
    out = torch.empty(experts, tiles, 8, 2, 8, granules, 2, 2, 4, 2, dtype=torch.float64)
    for row_half, pair in enumerate((near, far)):
        for parity in (0, 1):
            value = bf16(pair >> 16 * parity) * 2.0**120
            in_order = value.permute(0, 1, 3, 4, 2, 6, 7, 5).double()
            out[:, :, :, row_half, :, :, :, :, :, parity] = in_order
    return out.view(experts, tiles * 128, granules * 32)


def drawn(experts: int, rows: int, columns: int, seed: int = 0) -> Fp8BlockWeight:
    """Every code but NaN."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(
        127, (experts, rows, columns), generator=generator, dtype=torch.uint8
    ) | torch.randint(2, (experts, rows, columns), generator=generator, dtype=torch.uint8).mul(128)
    scales = torch.rand(experts, -(-rows // 128), -(-columns // 128), generator=generator)
    return Fp8BlockWeight(codes.view(torch.float8_e4m3fn), scales)


def test_the_ptx_has_the_masks_that_this_test_reads_with():
    masks = set(re.findall(r"0x[0-9A-F]{8}", decode_fp8_ptx(has_bf16_mul=True)))
    assert masks == {"0x80008000", "0x7B807B80", "0x87F087F0", "0x80F080F0", "0x07000700"}


@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (256, 384), (37, 51), (200, 136)])
def test_one_stack(rows: int, columns: int):
    weight = drawn(3, rows, columns)
    assert len(weight.data.view(torch.uint8).unique()) == 254
    packed = pack_fp8((weight,))
    values = as_the_kernel_reads(packed)
    assert torch.equal(values[:, :rows, :columns], weight.data.double())
    assert not values[:, rows:].any()
    assert not values[:, :, columns:].any()
    assert torch.equal(packed.scales[..., 0], weight.scale_inv)


def test_gate_and_up_alternate_and_keep_their_scales():
    gate, up = drawn(2, 200, 136, seed=1), drawn(2, 200, 136, seed=2)
    packed = pack_fp8((gate, up))
    values = as_the_kernel_reads(packed).view(2, 4, 8, 2, 8, 256)
    for half, part in enumerate((gate, up)):
        ours = values[:, :, :, half].reshape(2, 256, 256)
        assert torch.equal(ours[:, :200, :136], part.data.double())
        # tiles of 64 features: two share a block of 128 rows
        assert torch.equal(packed.scales[..., half], part.scale_inv.repeat_interleave(2, dim=1))


def test_one_scale_for_a_matrix_is_the_scale_of_each_block():
    block = drawn(2, 130, 300)
    tensor = Fp8TensorWeight(block.data, torch.tensor([0.5, 3.0]))
    packed = pack_fp8((tensor,))
    assert packed.scales.shape == (2, 2, 3, 1)
    assert (packed.scales[0] == 0.5).all()
    assert (packed.scales[1] == 3.0).all()


def test_a_nan_makes_the_scale_of_its_block_nan():
    weight = drawn(2, 200, 300)
    weight.data.view(torch.uint8)[1, 140, 299] = 0xFF
    is_nan = pack_fp8((weight,)).scales.isnan()[..., 0]
    assert is_nan.nonzero().tolist() == [[1, 1, 2]]


def test_nothing_is_added_to_whole_blocks():
    weight = drawn(2, 256, 384)
    assert pack_fp8((weight,)).nbytes == weight.nbytes
