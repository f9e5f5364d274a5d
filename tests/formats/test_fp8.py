"""FP8 per tensor and per block, and the arithmetic of the stored classes."""

from __future__ import annotations

import pytest
import torch

from tests.formats.folders import matrix
from tetrad.formats import fp8
from tetrad.formats.weights import Fp8BlockWeight, Fp8TensorWeight

RAGGED = [(128, 128), (256, 384), (100, 60), (129, 257), (1, 128), (300, 1)]


def test_per_tensor_uses_the_whole_range():
    weight = matrix(8, 24)
    quantized = fp8.quantize_tensor(weight)
    assert quantized.data.float().abs().max().item() == 448.0
    assert torch.allclose(quantized.dequantize(torch.float32), weight, rtol=1 / 16, atol=1e-4)


@pytest.mark.parametrize(("out", "width"), RAGGED)
def test_block_scales_belong_to_their_block(out: int, width: int):
    data = torch.ones(out, width).to(torch.float8_e4m3fn)
    rows, columns = -(-out // 128), -(-width // 128)
    scale = torch.arange(1.0, rows * columns + 1).view(rows, columns)
    values = Fp8BlockWeight(data, scale).dequantize(torch.float32)
    for i in {0, out - 1, out // 2, min(127, out - 1), min(128, out - 1)}:
        for j in {0, width - 1, width // 2, min(127, width - 1), min(128, width - 1)}:
            assert values[i, j].item() == scale[i // 128, j // 128].item(), (i, j)


@pytest.mark.parametrize(("out", "width"), RAGGED)
def test_quantising_blocks_comes_back(out: int, width: int):
    weight = matrix(out, width)
    weight[-1] *= 1000.0
    quantized = fp8.quantize_block(weight)
    assert quantized.shape == (out, width)
    error = (quantized.dequantize(torch.float32) - weight).abs()
    block_max = quantized.scale_inv.repeat_interleave(128, 0)[:out].repeat_interleave(128, 1)
    assert (error <= weight.abs() / 16 + block_max[:, :width] * 2.0**-9).all()


@pytest.mark.parametrize("quantize", [fp8.quantize_tensor, fp8.quantize_block])
def test_zeros_stay_zero(quantize):
    values = quantize(torch.zeros(130, 20)).dequantize(torch.bfloat16)
    assert torch.equal(values, torch.zeros(130, 20, dtype=torch.bfloat16))


@pytest.mark.parametrize("quantize", [fp8.quantize_tensor, fp8.quantize_block])
@pytest.mark.parametrize("size", [1e-45, 1e-42, 1e-36, 1e38])
def test_the_smallest_and_largest_numbers_stay_finite(quantize, size: float):
    """A scale that underflows to zero would turn them into NaN."""
    weight = torch.tensor([[size, -size / 3, 0.0, size / 2]])
    values = quantize(weight).dequantize(torch.float32)
    assert torch.allclose(values, weight, rtol=1 / 16, atol=1e-38)


@pytest.mark.parametrize("seed", range(20))
def test_division_never_lifts_a_value_out_of_range(seed: int):
    weight = matrix(2, 4, seed) * 3.3e-5
    values = fp8.quantize_tensor(weight).dequantize(torch.float32)
    assert torch.allclose(values.abs().max(), weight.abs().max(), rtol=1e-6)


def test_stacked_scales_belong_to_their_matrix():
    data = torch.ones(2, 3, 4).to(torch.float8_e4m3fn)
    values = Fp8TensorWeight(data, torch.tensor([2.0, 3.0])).dequantize(torch.float32)
    assert values[0].unique().tolist() == [2.0]
    assert values[1].unique().tolist() == [3.0]
    blocks = Fp8BlockWeight(data, torch.tensor([[[5.0]], [[7.0]]])).dequantize(torch.float32)
    assert blocks[1].unique().tolist() == [7.0]
