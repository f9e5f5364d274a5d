"""A linear layer without bias."""

from __future__ import annotations

import torch
from torch import Tensor

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
