"""Norms."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.layers.source import WeightSource


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, source: WeightSource, name: str, width: int, eps: float) -> None:
        self.op = source.ops.rms_norm
        self.weight = source.vector(f"{name}.weight", width)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """[T, W] to [T, W]."""
        y: Tensor = self.op(x, self.weight, self.eps)
        return y


class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * weight + bias; weight and bias stay in fp32."""

    def __init__(self, source: WeightSource, name: str, width: int, eps: float) -> None:
        self.op = source.ops.layer_norm
        self.weight = source.vector(f"{name}.weight", width, torch.float32)
        self.bias = source.vector(f"{name}.bias", width, torch.float32)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """[T, W] to [T, W]."""
        y: Tensor = self.op(x, self.weight, self.bias, self.eps)
        return y
