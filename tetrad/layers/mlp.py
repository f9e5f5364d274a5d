"""The gated MLP of dense layers and of the shared expert."""

from __future__ import annotations

from torch import Tensor

from tetrad.layers.linear import Linear
from tetrad.layers.source import WeightSource


class Mlp:
    """down(silu(gate(x)) * up(x)), plus the residual where one is given."""

    def __init__(self, source: WeightSource, hidden: int, intermediate: int) -> None:
        self.activation = source.ops.activation
        self.gate = Linear(source, "gate_proj", intermediate, hidden)
        self.up = Linear(source, "up_proj", intermediate, hidden)
        self.down = Linear(source, "down_proj", hidden, intermediate)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[T, D] to [T, D]."""
        y = self.down(self.activation(self.gate(x), self.up(x)))
        return y if residual is None else residual + y
