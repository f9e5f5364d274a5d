"""The gated MLP of dense layers and of the shared expert."""

from __future__ import annotations

from torch import Tensor

from tetrad.formats.weights import Weight
from tetrad.layers.linear import Linear
from tetrad.layers.norm import Sum
from tetrad.layers.source import WeightSource


class GateUp:
    """silu(gate(x)) * up(x): one product where both are stored dense, else two."""

    def __init__(self, source: WeightSource, gate: Weight, up: Weight) -> None:
        self.linear, self.activation = source.ops.linear, source.ops.activation
        groups = [[gate, up]] if source.can_join([gate, up]) else [[gate], [up]]
        self.weights = [source.prepared(group, self.linear) for group in groups]

    def __call__(self, x: Tensor) -> Tensor:
        """[T, D] to [T, F]."""
        products = [self.linear(x, weight) for weight in self.weights]
        gate, up = products if len(products) == 2 else products[0].chunk(2, dim=-1)
        hidden: Tensor = self.activation(gate, up)
        return hidden


class Mlp:
    """down(silu(gate(x)) * up(x)), plus the residual."""

    def __init__(self, source: WeightSource, hidden: int, intermediate: int) -> None:
        gate, up = (source.stored(f"{name}_proj", intermediate, hidden) for name in ("gate", "up"))
        self.gate_up = GateUp(source, gate, up)
        self.down = Linear(source, "down_proj", hidden, intermediate)
        self.others = source.others

    def place_for(self, _num_rows: int) -> Tensor | None:
        """Anywhere."""
        return None

    def __call__(self, x: Tensor, residual: Tensor, _is_padding: Tensor | None = None) -> Sum:
        """[T, D] and [T, D] to [T, D]. Padding is computed: here it reads no weights of its own."""
        return Sum(self.others.all_reduce(self.down(self.gate_up(x))), residual)
