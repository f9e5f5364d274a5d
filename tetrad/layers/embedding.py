"""Token embedding."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from tetrad.layers.source import WeightSource


class Embedding:
    """One row per token id."""

    def __init__(self, source: WeightSource, name: str, vocab: int, hidden: int) -> None:
        self.table = source.table(f"{name}.weight", vocab, hidden)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[T] to [T, D]."""
        return functional.embedding(token_ids, self.table)
