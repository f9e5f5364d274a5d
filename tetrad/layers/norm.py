"""Norms."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tetrad.layers.source import WeightSource


@dataclass(frozen=True, slots=True)
class Sum:
    """Rows [T, W] whose addends nobody has added up yet: the next norm does, at no launch more."""

    x: Tensor
    residual: Tensor
    more: Tensor | None = None

    def __getitem__(self, rows: Tensor) -> Sum:
        """Of some rows."""
        more = None if self.more is None else self.more[rows]
        return Sum(self.x[rows], self.residual[rows], more)


Hidden = Tensor | Sum


def formed(hidden: Hidden) -> Tensor:
    """Rows [T, W] as they are, or added up."""
    if not isinstance(hidden, Sum):
        return hidden
    total = hidden.residual if hidden.more is None else hidden.residual + hidden.more
    return hidden.x + total


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

    def of(self, hidden: Hidden, into: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Rows [T, W], their addends added up, and the norm of that; that of a sum in `into`."""
        if not isinstance(hidden, Sum):
            return hidden, self(hidden)
        found: tuple[Tensor, Tensor] = self.sum_op(
            hidden.x, hidden.residual, self.weight, self.eps, hidden.more, into
        )
        return found
