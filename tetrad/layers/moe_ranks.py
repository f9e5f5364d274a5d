"""A block of experts that several ranks share.

Without data parallelism all ranks see the same rows: each adds its experts and its columns of the
shared expert, and one all-reduce sums. With it each group routes its own rows, sends them to the
experts of all ranks and gets sums back; the shared expert sees own rows only.
"""

from __future__ import annotations

from torch import Tensor

from tetrad.core.arch import ModelArch
from tetrad.layers.moe import Moe
from tetrad.layers.norm import Sum
from tetrad.layers.source import WeightSource


class SplitMoe(Moe):
    """One rank's part of a block whose ranks see the same rows."""

    def __init__(self, arch: ModelArch, source: WeightSource) -> None:
        self.others = source.others
        super().__init__(arch, source, self.others.ranks.held(arch.moe.num_experts))

    def __call__(self, x: Tensor, residual: Tensor, is_padding: Tensor | None = None) -> Sum:
        """[T, D] and [T, D] to [T, D]."""
        weights, ids, hidden = self.route(x, is_padding)
        part: Tensor = self.experts_op(x, self.experts, ids, weights, self.down(hidden), None)
        return Sum(self.others.all_reduce(part), residual)


class ExchangingMoe(Moe):
    """One rank's part of a block whose groups bring rows of their own."""

    def __init__(self, arch: ModelArch, source: WeightSource) -> None:
        self.others = source.others
        self.exchange = self.others.exchange(arch)
        held = self.others.ranks.held(arch.moe.num_experts)
        super().__init__(arch, source, held, self.exchange.counts_all)

    def place_for(self, num_rows: int) -> Tensor:
        """Among the rows of all groups, so that nothing copies x there."""
        return self.exchange.own(num_rows)[0]

    def __call__(self, x: Tensor, residual: Tensor, _is_padding: Tensor | None = None) -> Sum:
        """[T, D] and [T, D] to [T, D], of the own rows; x lies where `place_for` says. Padding goes
        to experts like any row."""
        _, *slots = self.exchange.own(len(x))
        _, _, hidden = self.front(x, (slots[0], slots[1]))
        rows, local_ids, slot_weights = self.exchange.dispatch(len(x))
        part = self.experts_op(rows, self.experts, local_ids, slot_weights, None, None)
        shared = self.others.all_reduce(self.down(hidden))
        return Sum(self.exchange.combine(part), residual, shared)


def moe_of(arch: ModelArch, source: WeightSource) -> Moe:
    """The block as its rank runs it."""
    ranks = source.others.ranks
    if ranks.tp == 1:
        return Moe(arch, source)
    return SplitMoe(arch, source) if ranks.attn_dp == 1 else ExchangingMoe(arch, source)
