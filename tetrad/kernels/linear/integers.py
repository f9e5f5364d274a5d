"""Linear layer of a CPU over integer weights, by the kernels that torch has for them.

They decode in registers, so that a step of few tokens, which waits for memory, reads four or eight
bits a weight instead of sixteen. A step of many tokens computes rather than waits, and matrix units
want bf16: for these the decoded weight is held too (docs/decisions/015).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tetrad.core.hardware import DeviceSnapshot
from tetrad.formats.weights import INT_BLOCK, Int4Weight, Int8BlockWeight, Int8Weight, Weight
from tetrad.kernels.backend import Backend
from tetrad.kernels.linear import reference

MOST_ROWS = {"int4": 24, "int8": 6, "int8_block": 4}
"""Format → rows of x up to which its kernel is faster than a product in bf16; measured on a Zen 4
with two cores."""
MULTIPLE = 32
"""Of rows for the four-bit kernel and of columns for the eight-bit one, which reads beyond its end
with others."""


@dataclass(frozen=True, eq=False)
class IntegerLinear:
    """An integer matrix as torch's kernels take it, and decoded."""

    parts: tuple[tuple[Tensor, Tensor], ...]
    """Codes and scales of each product that is summed: uint8 in the four-bit kernel's order with
    bf16 [in / 32, out, 2], factor and offset of code - 8; or int8 [out, in] with bf16 [out]."""
    dense: Tensor
    """bf16 [out, in]."""
    format_name: str
    """Of what was stored."""

    @property
    def shape(self) -> torch.Size:
        """[out, in]"""
        return self.dense.shape

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.dense.nbytes + sum(part.nbytes for pair in self.parts for part in pair)


def why_not(device: DeviceSnapshot) -> str | None:
    """These kernels are fast with AVX-512 only."""
    if device.kind != "cpu":
        return "runs on a CPU; on a GPU integer weights are decoded when they are loaded"
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return "this processor has no AVX-512, without which torch decodes number by number"
    return None


def prepare(weight: Weight, dtype: torch.dtype) -> Weight | IntegerLinear:
    """Integers beside bf16 activations; anything else as the reference takes it, which is what the
    kernels are slower than in fp32."""
    if dtype != torch.bfloat16 or weight.device.type != "cpu":
        return reference.prepare(weight, dtype)
    parts: tuple[tuple[Tensor, Tensor], ...] = ()
    if isinstance(weight, Int8Weight) and weight.shape[1] % MULTIPLE == 0:
        parts = ((weight.data, weight.scale.to(dtype)),)
    elif weight.shape[0] % MULTIPLE == 0 and isinstance(weight, Int4Weight):
        parts = (_packed(weight.unpacked(), weight.scales, weight.minimums),)
    elif weight.shape[0] % MULTIPLE == 0 and isinstance(weight, Int8BlockWeight):
        parts = _nibbles(weight)
    if not parts:
        return reference.prepare(weight, dtype)
    return IntegerLinear(parts, weight.dequantize(dtype), weight.format_name)


def run(x: Tensor, weight: Weight | IntegerLinear) -> Tensor:
    """Sums in fp32, rounded once; of an Int8BlockWeight each of two products is rounded."""
    if not isinstance(weight, IntegerLinear):
        return reference.run(x, weight)
    if len(x) > MOST_ROWS[weight.format_name]:
        return functional.linear(x, weight.dense)
    rows = x.contiguous()
    y: Tensor | None = None
    for codes, scales in weight.parts:
        product: Tensor
        if codes.dtype == torch.int8:
            product = torch.ops.aten._weight_int8pack_mm(rows, codes, scales)
        else:
            product = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, codes, INT_BLOCK, scales)
        y = product if y is None else y.add_(product)
    assert y is not None
    return y


def _packed(codes: Tensor, scales: Tensor, minimums: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 [out, in] of value code * scale + minimum; the kernel multiplies code - 8."""
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    both = torch.stack([scales, minimums + 8 * scales], dim=-1).transpose(0, 1)
    return packed, both.to(torch.bfloat16).contiguous()


def _nibbles(weight: Int8BlockWeight) -> tuple[tuple[Tensor, Tensor], ...]:
    """value = (16 high + low) scale, with high from -8 to 7 and low from 0 to 15."""
    low, high = weight.data & 15, (weight.data >> 4) + 8
    zero = torch.zeros_like(weight.scales)
    return (
        _packed(high, 16 * weight.scales, -128 * weight.scales),
        _packed(low, weight.scales, zero),
    )


BACKEND = Backend("integers", run, why_not, prepare)
