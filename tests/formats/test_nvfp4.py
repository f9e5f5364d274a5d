"""NVFP4 against its definition in bits, computed with exact fractions."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.formats.folders import matrix
from tetrad.formats import e2m1, nvfp4
from tetrad.formats.weights import Nvfp4Weight

NAN_BYTES = (0x7F, 0xFF)
FINITE_BYTES = [byte for byte in range(256) if byte not in NAN_BYTES]


def small_float(bits: int, exponent_bits: int, mantissa_bits: int, bias: int) -> Fraction:
    """The value of a sign-exponent-mantissa pattern with subnormals and no infinities."""
    sign = -1 if bits >> (exponent_bits + mantissa_bits) & 1 else 1
    exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1)
    mantissa = Fraction(bits & ((1 << mantissa_bits) - 1), 1 << mantissa_bits)
    if exponent == 0:
        return sign * mantissa * Fraction(2) ** (1 - bias)
    return sign * (1 + mantissa) * Fraction(2) ** (exponent - bias)


def e2m1_value(code: int) -> Fraction:
    return small_float(code, exponent_bits=2, mantissa_bits=1, bias=1)


def e4m3_value(byte: int) -> Fraction:
    return small_float(byte, exponent_bits=4, mantissa_bits=3, bias=7)


def all_pairs(global_scale: float) -> Nvfp4Weight:
    """Row r has scale byte FINITE_BYTES[r] and the codes 0 to 15."""
    codes = e2m1.pack(torch.arange(16, dtype=torch.uint8).expand(len(FINITE_BYTES), 16))
    scales = torch.tensor(FINITE_BYTES, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    return Nvfp4Weight(codes, scales, torch.tensor(global_scale))


def test_the_table_is_the_definition():
    assert len(FINITE_BYTES) == 254
    assert [Fraction(value) for value in e2m1.E2M1_VALUES] == [e2m1_value(c) for c in range(16)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_code_times_every_scale_is_exact(dtype: torch.dtype):
    values = all_pairs(1.0).dequantize(dtype)
    for row, byte in enumerate(FINITE_BYTES):
        expected = [e2m1_value(code) * e4m3_value(byte) for code in range(16)]
        assert [Fraction(value) for value in values[row].tolist()] == expected


@pytest.mark.parametrize("global_scale", [1.0 / 2688.0, 0.1, 3.7e-9, 12345.678])
def test_the_global_scale_rounds_once(global_scale: float):
    weight = all_pairs(global_scale)
    # A product of 2, 4 and 24 significant bits fits float64, so this rounds once, to float32.
    exact = all_pairs(1.0).dequantize(torch.float32).double() * weight.global_scale.double()
    assert torch.equal(weight.dequantize(torch.float32), exact.float())


def test_every_byte_survives_unpacking_and_packing():
    every = torch.arange(256, dtype=torch.uint8).reshape(2, 128)
    assert torch.equal(e2m1.pack(e2m1.unpack(every)), every)
    values = [e2m1.E2M1_VALUES[code] for code in e2m1.unpack(every).flatten().tolist()]
    assert e2m1.decode(every).flatten().tolist() == values


def test_the_even_column_is_in_the_low_nibble():
    assert e2m1.pack(torch.tensor([1, 2], dtype=torch.uint8)).tolist() == [0x21]
    assert e2m1.decode(torch.tensor([0x21], dtype=torch.uint8)).tolist() == [0.5, 1.0]


def nearest_even(value: Fraction) -> int:
    """Brute force: the nearest of the eight magnitudes, the even code when two are as near."""
    code = min(range(8), key=lambda c: (abs(e2m1_value(c) - abs(value)), c % 2))
    return code + 8 if value < 0 else code


def test_rounding_is_to_the_nearest_and_ties_go_to_even():
    values = [Fraction(n, 32) for n in range(-256, 257)]
    codes = e2m1.encode(torch.tensor([float(v) for v in values]))
    assert codes.tolist() == [nearest_even(value) for value in values]


def test_just_beside_a_tie_is_not_a_tie():
    tie = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    above, below = (torch.nextafter(tie, torch.tensor(end)) for end in (9.0, 0.0))
    assert e2m1.encode(above).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert e2m1.encode(below).tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_negative_zero_is_zero_and_small_negatives_keep_their_sign():
    assert e2m1.encode(torch.tensor([-0.0, -0.1, 0.1])).tolist() == [0, 8, 0]


def test_scales_follow_the_recipe():
    weight = matrix(4, 32)
    weight[2, 5] = 9.0
    quantized = nvfp4.quantize(weight)
    assert quantized.global_scale.item() == (torch.tensor(9.0) / 2688).item()
    assert quantized.scales.float()[2, 0].item() == 448.0
    ideal = weight.view(4, 2, 16).abs().amax(-1) / 6 / quantized.global_scale
    assert torch.allclose(quantized.scales.float(), ideal, rtol=1 / 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_zero_matrix_and_a_zero_block_stay_zero(dtype: torch.dtype):
    zero = nvfp4.quantize(torch.zeros(2, 32, dtype=dtype))
    assert torch.equal(zero.dequantize(dtype), torch.zeros(2, 32, dtype=dtype))
    weight = matrix(2, 32).to(dtype)
    weight[0, :16] = 0
    quantized = nvfp4.quantize(weight)
    assert quantized.dequantize(dtype)[0, :16].count_nonzero() == 0
    assert quantized.scales[0, 0].item() == 1.0


@pytest.mark.parametrize("size", [1e-45, 1e-42, 1e-36, 1e38])
def test_the_smallest_and_largest_numbers_stay_finite(size: float):
    """A global scale that underflows to zero would turn them into NaN."""
    weight = torch.tensor([[size, -size / 3, 0.0, size / 2] * 4 + [0.0] * 16])
    values = nvfp4.quantize(weight).dequantize(torch.float32)
    assert torch.allclose(values, weight, rtol=0.0, atol=max(size / 6, 1e-38))


def test_what_lies_on_the_grid_is_kept_exactly():
    weight = all_pairs(1.0)
    positive = weight.scales.float()[:, 0] > 0
    exact = weight.dequantize(torch.float32)[positive]
    again = nvfp4.quantize(exact, torch.tensor(1.0))
    assert torch.equal(again.dequantize(torch.float32), exact)
    assert torch.equal(again.scales.float(), weight.scales.float()[positive])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=32, max_size=32), st.booleans()
)
def test_the_error_is_at_most_half_a_step(values: list[float], coarse: bool):
    weight = torch.tensor(values, dtype=torch.float32).view(2, 16)
    weight = weight.to(torch.bfloat16) if coarse else weight
    quantized = nvfp4.quantize(weight)
    result = quantized.dequantize(torch.float32)
    assert torch.isfinite(result).all()
    # The widest gap of the grid is 2 (from 4 to 6). A block scale that was rounded down saturates
    # at 6 instead, and loses at most the rounding of e4m3: 1/16 of the block's largest value, or
    # six times half of the smallest e4m3 number for tiny blocks.
    step = quantized.scales.float() * quantized.global_scale
    amax = weight.float().abs().amax(dim=-1, keepdim=True)
    tiny = 6 * 2.0**-10 * quantized.global_scale
    bound = torch.maximum(torch.maximum(step, amax / 16), tiny) * 1.001 + 2.0**-149
    assert ((result - weight.float()).abs() <= bound).all()
