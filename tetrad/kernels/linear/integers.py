"""Linear layer of a CPU over integer weights, by the kernels that torch has for them.

They decode in registers, so that a step of few tokens, which waits for memory, reads four or eight
bits a weight instead of sixteen. A step of many tokens computes rather than waits, and matrix units
want bf16: for these the decoded weight is held too (docs/decisions/014).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tetrad.core.hardware import DeviceSnapshot
from tetrad.formats.weights import INT4_BLOCK, Int4Weight, Int8Weight, Weight
from tetrad.kernels.backend import Backend
from tetrad.kernels.linear import reference

MOST_ROWS = {4: 24, 8: 6}
"""Bits of a weight → rows of x up to which its kernel is faster than a product in bf16; measured on
a Zen 4 with two cores."""
MULTIPLE = 32
"""Of rows for the four-bit kernel and of columns for the eight-bit one, which reads beyond its end
with others."""


@dataclass(frozen=True, eq=False)
class IntegerLinear:
    """An integer matrix as torch's kernels take it, and decoded."""

    codes: Tensor
    """uint8 in the kernel's order, or int8 [out, in]."""
    scales: Tensor
    """bf16 [in / 32, out, 2], factor and offset of code - 8; or bf16 [out]."""
    dense: Tensor
    """bf16 [out, in]."""
    bits: int

    @property
    def shape(self) -> torch.Size:
        """[out, in]"""
        return self.dense.shape

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.codes.nbytes + self.scales.nbytes + self.dense.nbytes


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
    is_bf16 = dtype == torch.bfloat16 and weight.device.type == "cpu"
    if is_bf16 and isinstance(weight, Int4Weight) and weight.shape[0] % MULTIPLE == 0:
        return _packed(weight)
    if is_bf16 and isinstance(weight, Int8Weight) and weight.shape[1] % MULTIPLE == 0:
        scales = weight.scale.to(dtype)
        return IntegerLinear(weight.data, scales, weight.dequantize(dtype), 8)
    return reference.prepare(weight, dtype)


def run(x: Tensor, weight: Weight | IntegerLinear) -> Tensor:
    """Sums in fp32, rounded once."""
    if not isinstance(weight, IntegerLinear):
        return reference.run(x, weight)
    if len(x) > MOST_ROWS[weight.bits]:
        return functional.linear(x, weight.dense)
    rows = x.contiguous()
    y: Tensor
    if weight.bits == 8:
        y = torch.ops.aten._weight_int8pack_mm(rows, weight.codes, weight.scales)
        return y
    y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, weight.codes, INT4_BLOCK, weight.scales)
    return y


def _packed(weight: Int4Weight) -> IntegerLinear:
    """The kernel multiplies code - 8."""
    codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.unpacked().int(), 1)
    both = torch.stack([weight.scales, weight.minimums + 8 * weight.scales], dim=-1)
    scales = both.transpose(0, 1).to(torch.bfloat16).contiguous()
    return IntegerLinear(codes, scales, weight.dequantize(torch.bfloat16), 4)


BACKEND = Backend("integers", run, why_not, prepare)
