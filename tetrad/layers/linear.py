"""Linear layers without bias."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tetrad.formats.weights import Weight, joined
from tetrad.layers.source import WeightSource


class Linear:
    """y = x W^T, with W as the checkpoint stores it."""

    def __init__(
        self,
        source: WeightSource,
        name: str,
        out: int,
        width: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.op = source.ops.linear
        self.weight = source.linear(name, out, width, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        y: Tensor = self.op(x, self.weight)
        return y


class StackedLinears:
    """Several matrices times the same x, side by side: one product where their format lets them
    stand one above the other."""

    def __init__(self, source: WeightSource, rows: Mapping[str, int], width: int) -> None:
        """`rows`: of each matrix, by its name."""
        self.op = source.ops.linear
        stored = [source.stored(name, out, width) for name, out in rows.items()]
        whole = joined(stored)
        if whole is None:
            self.weights = [source.prepared([each], self.op) for each in stored]
        else:
            self.weights = [source.stack_prepared(whole, stored, self.op)]

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, sum of rows]."""
        products: list[Tensor] = [self.op(x, weight) for weight in self.weights]
        return products[0] if len(products) == 1 else torch.cat(products, dim=-1)


class JoinedLinears:
    """Several matrices times the same x: where they can be joined one product, whose results stay
    in fp32; else each by itself, rounded to the type of x."""

    def __init__(self, source: WeightSource, stored: Sequence[Weight]) -> None:
        is_joined = source.can_join(stored)
        self.op = source.ops.router if is_joined else source.ops.linear
        groups = [stored] if is_joined else [[each] for each in stored]
        self.weights = [source.prepared(group, self.op) for group in groups]
        self.widths = [each.shape[0] for each in stored]

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """[T, in] to [T, out] of each; of joined ones, slices of wider rows."""
        products: list[Tensor] = [self.op(x, weight) for weight in self.weights]
        if len(products) < len(self.widths):
            return torch.split(products[0], self.widths, dim=-1)
        return products
