"""What the tests of the linear layer's Triton kernel share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tetrad.formats.weights import (
    DenseWeight,
    Int4Weight,
    Int8BlockWeight,
    Int8Weight,
    Nvfp4Weight,
    Weight,
)
from tetrad.kernels.contract import Case
from tetrad.kernels.draw import Draw
from tetrad.kernels.linear.packed import PackedLinear, pack
from tetrad.kernels.linear.triton_dense import DenseLinear


@dataclass(frozen=True)
class Drawn:
    """One call of the op and its weight, as stored and as packed."""

    x: Tensor
    weight: Weight
    packed: PackedLinear

    def expected(self, x: Tensor | None = None) -> Tensor:
        """[T, out] float64."""
        return (self.x if x is None else x).double() @ exact(self.weight).T


def exact(weight: Weight) -> Tensor:
    """float64 [out, in]; no product is rounded to fp32."""
    if not isinstance(weight, Nvfp4Weight):
        return weight.dequantize(torch.float64)
    unscaled = Nvfp4Weight(weight.codes, weight.scales, torch.ones_like(weight.global_scale))
    return unscaled.dequantize(torch.float64) * weight.global_scale.double()


def draw_linear(
    device: torch.device,
    format_name: str,
    out: int,
    width: int,
    num_tokens: int,
    is_large: bool = False,
    seed: int = 0,
) -> Drawn:
    """On a GPU in bf16; on a CPU, for the interpreter, the activations are fp32."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    draw = Draw.of(Case(f"seed {seed}", {}, is_large), dtype, device)
    weight = draw.weight(format_name, out, width)
    assert not isinstance(weight, DenseWeight | Int4Weight | Int8Weight | Int8BlockWeight)
    return Drawn(draw.normal(num_tokens, width), weight, pack(weight))


@dataclass(frozen=True)
class DrawnDense:
    """One call over a dense weight."""

    x: Tensor
    weight: DenseLinear

    def expected(self, x: Tensor | None = None) -> Tensor:
        """[T, out] float64."""
        return (self.x if x is None else x).double() @ self.weight.weight.double().T


def draw_dense(
    device: torch.device, out: int, width: int, num_tokens: int, seed: int = 0
) -> DrawnDense:
    """As `draw_linear`, dense."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    draw = Draw.of(Case(f"seed {seed}", {}, device.type == "cuda"), dtype, device)
    weight = draw.weight("bf16", out, width)
    assert isinstance(weight, DenseWeight)
    return DrawnDense(draw.normal(num_tokens, width), DenseLinear.of(weight.data))


def relative_error(ours: Tensor, truth: Tensor) -> float:
    """Relative L2."""
    return float((ours.double() - truth).norm() / truth.norm())
