"""Norms."""

from __future__ import annotations

from torch import Tensor

from tetrad.layers.source import WeightSource


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, source: WeightSource, name: str, width: int, eps: float) -> None:
        self.op, self.sum_op = source.ops.rms_norm, source.ops.add_rms_norm
        self.weight = source.vector(f"{name}.weight", width)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """[T, W] to [T, W]."""
        y: Tensor = self.op(x, self.weight, self.eps)
        return y

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """x + residual, and the norm of that; all [T, W]."""
        found: tuple[Tensor, Tensor] = self.sum_op(x, residual, self.weight, self.eps)
        return found
