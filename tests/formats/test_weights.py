"""The weight classes and stacking."""

from __future__ import annotations

import pytest
import torch

from tests.formats.folders import matrix
from tetrad.formats import fp8, nvfp4
from tetrad.formats.weights import DenseWeight, Fp8TensorWeight, Nvfp4Weight, Weight, stack


def every_format(seed: int = 0) -> list[Weight]:
    weight = matrix(48, 160, seed)
    return [
        DenseWeight(weight.bfloat16()),
        fp8.quantize_tensor(weight),
        fp8.quantize_block(weight),
        nvfp4.quantize(weight),
    ]


NAMES = [weight.format_name for weight in every_format()]


def test_format_names():
    assert NAMES == ["bf16", "fp8_tensor", "fp8_block", "nvfp4"]


@pytest.mark.parametrize("kind", range(4), ids=NAMES)
def test_shape_is_the_logical_one(kind: int):
    weight = every_format()[kind]
    assert weight.shape == (48, 160)
    assert weight.dequantize(torch.float32).shape == (48, 160)


def test_bytes_count_the_scales():
    values = 48 * 160
    expected = [2 * values, values + 4, values + 2 * 4, values // 2 + values // 16 + 4]
    assert [weight.nbytes for weight in every_format()] == expected


@pytest.mark.parametrize("kind", range(4), ids=NAMES)
def test_a_stack_holds_each_of_its_weights(kind: int):
    weights = [every_format(seed)[kind] for seed in range(3)]
    stacked = stack(weights)
    assert type(stacked) is type(weights[0])
    assert stacked.shape == (3, 48, 160)
    assert stacked.nbytes == sum(weight.nbytes for weight in weights)
    for index, weight in enumerate(weights):
        expected = weight.dequantize(torch.float32)
        assert torch.equal(stacked.dequantize(torch.float32)[index], expected)


def test_stacking_an_iterator_holds_one_weight_at_a_time():
    alive = 0

    def one_by_one():
        nonlocal alive
        for seed in range(3):
            alive += 1
            yield every_format(seed)[3]

    assert stack(one_by_one(), 3).shape == (3, 48, 160)
    assert alive == 3


def test_gate_and_up_keep_their_own_global_scale():
    small, large = matrix(16, 32), matrix(16, 32, seed=1) * 10
    stacked = stack([nvfp4.quantize(small), nvfp4.quantize(large)])
    assert isinstance(stacked, Nvfp4Weight)
    assert stacked.global_scale[1] > 5 * stacked.global_scale[0]
    values = stacked.dequantize(torch.float32)
    for value, exact in zip(values, (small, large), strict=True):
        assert (value - exact).norm() / exact.norm() < 0.12


def test_formats_do_not_mix_in_a_stack():
    with pytest.raises(AssertionError, match="cannot stack fp8_tensor onto bf16"):
        stack(every_format()[:2])


def test_to_moves_every_tensor():
    meta = every_format()[3].to("meta")
    assert {tensor.device.type for tensor in meta.tensors().values()} == {"meta"}
    assert meta.device.type == "meta"


def test_a_malformed_weight_is_refused_where_it_is_made():
    with pytest.raises(AssertionError):
        Fp8TensorWeight(torch.ones(2, 3, 4).to(torch.float8_e4m3fn), torch.ones(3))
    good = nvfp4.quantize(matrix(4, 32))
    with pytest.raises(AssertionError):
        Nvfp4Weight(good.codes, good.scales[:, :1], good.global_scale)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", range(4), ids=NAMES)
def test_a_gpu_gives_the_same_values(kind: int):
    weight = every_format()[kind]
    there = weight.to("cuda").dequantize(torch.float32).cpu()
    assert torch.equal(there, weight.dequantize(torch.float32))


@pytest.mark.gpu
def test_a_gpu_quantises_the_same_bits():
    weight = matrix(48, 160)
    here, there = nvfp4.quantize(weight), nvfp4.quantize(weight.cuda())
    assert torch.equal(there.codes.cpu(), here.codes)
    assert torch.equal(there.scales.cpu().view(torch.uint8), here.scales.view(torch.uint8))
