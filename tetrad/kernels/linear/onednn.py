"""Linear layer of a CPU with bf16 activations: weights in the order that oneDNN multiplies in, and
integers beside them for steps of few rows.

A step of few rows waits for memory. torch's kernels for integers decode in registers, so they read
four or eight bits a weight instead of sixteen. More rows compute rather than wait, and are faster
in bf16 (docs/decisions/015).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tetrad.core.hardware import DeviceSnapshot
from tetrad.formats.weights import INT_BLOCK, Int4Weight, Int8BlockWeight, Int8Weight, Weight
from tetrad.kernels.backend import Backend
from tetrad.kernels.linear import reference

MOST_ROWS = {"int4": 8, "int8": 1, "int8_block": 2}
"""Format → rows of x up to which its kernel is faster than oneDNN's product in bf16; measured on
two cores of a Zen 4, for the matrices of SmolLM2-135M. On one core 4 is better for int4."""
MULTIPLE = 32
"""Of rows for the four-bit kernel and of columns for the eight-bit one, which reads beyond its end
with others."""
PACKED_FOR = 256
"""Rows of x that oneDNN is told to expect; it takes any number."""


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A matrix in oneDNN's order; integers also as torch's kernels take them."""

    dense: Tensor
    """bf16 [out, in], opaque."""
    format_name: str
    """Of what was stored."""
    parts: tuple[tuple[Tensor, Tensor], ...] = ()
    """Codes and scales of each product that is summed: uint8 in the four-bit kernel's order with
    bf16 [in / 32, out, 2], factor and offset of code - 8; or int8 [out, in] with bf16 [out]."""

    @property
    def shape(self) -> torch.Size:
        """[out, in]"""
        return self.dense.shape

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        out, width = self.shape
        return 2 * out * width + sum(part.nbytes for pair in self.parts for part in pair)


def why_not(device: DeviceSnapshot) -> str | None:
    """Other processors convert bf16 for each product."""
    if device.kind != "cpu":
        return "runs on a CPU; a GPU has kernels of its own"
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this processor does not multiply bf16; one with AVX512-BF16 or AMX does"
    return None


def prepare(weight: Weight, dtype: torch.dtype) -> Weight | PackedWeight:
    """Packed for bf16 activations; for others as the reference takes it."""
    if dtype != torch.bfloat16 or weight.device.type != "cpu":
        return reference.prepare(weight, dtype)
    parts: tuple[tuple[Tensor, Tensor], ...] = ()
    if isinstance(weight, Int8Weight) and weight.shape[1] % MULTIPLE == 0:
        parts = ((weight.data, weight.scale.to(dtype)),)
    elif weight.shape[0] % MULTIPLE == 0 and isinstance(weight, Int4Weight):
        parts = (_packed(weight.unpacked(), weight.scales, weight.minimums),)
    elif weight.shape[0] % MULTIPLE == 0 and isinstance(weight, Int8BlockWeight):
        parts = _nibbles(weight)
    decoded = weight.dequantize(dtype).contiguous()
    dense = torch.ops.mkldnn._reorder_linear_weight(decoded, PACKED_FOR)
    return PackedWeight(dense, weight.format_name, parts)


def run(x: Tensor, weight: Weight | PackedWeight) -> Tensor:
    """Sums in fp32, rounded once; of an Int8BlockWeight each of two products is rounded."""
    if not isinstance(weight, PackedWeight):
        return reference.run(x, weight)
    if len(x) == 0:
        return x.new_empty(0, weight.shape[0])
    y: Tensor | None = None
    rows = x.contiguous()
    if len(x) <= MOST_ROWS.get(weight.format_name, 0):
        for codes, scales in weight.parts:
            product: Tensor
            if codes.dtype == torch.int8:
                product = torch.ops.aten._weight_int8pack_mm(rows, codes, scales)
            else:
                product = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, codes, INT_BLOCK, scales)
            y = product if y is None else y.add_(product)
    if y is None:
        y = torch.ops.mkldnn._linear_pointwise(rows, weight.dense, None, "none", [], "")
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


BACKEND = Backend("onednn", run, why_not, prepare)
