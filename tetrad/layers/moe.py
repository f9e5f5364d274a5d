"""Mixture of experts: router, routed experts, shared expert.

Where router and shared expert are stored dense, router, gate and up are one product of x, and one
launch routes and applies the activation; docs/kernels.md counts the launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tetrad.core.arch import ModelArch, MoeArch
from tetrad.formats.weights import Weight
from tetrad.layers.linear import Linear
from tetrad.layers.mlp import GateUp
from tetrad.layers.norm import Hidden
from tetrad.layers.source import WeightSource

Front = tuple[Tensor, Tensor, Tensor]
"""Slot weights [T, K], ids [T, K], and what goes into the shared expert's down, [T, F]."""


Slots = tuple[Tensor | None, Tensor | None]
"""Where slot weights [T, K] and ids [T, K] are to be written; None: anywhere."""
NOWHERE: Slots = (None, None)


class JoinedFront:
    """Router, gate and up as one product."""

    def __init__(
        self, moe: MoeArch, source: WeightSource, held: range | None, weights: Sequence[Weight]
    ) -> None:
        self.product, self.use = source.ops.router, source.ops.route_activate
        self.weight = source.prepared(weights, self.product)
        self.routing = _routing(moe, source, held)
        self.dtype = source.dtype

    def __call__(self, x: Tensor, into: Slots = NOWHERE) -> Front:
        """Of x [T, D]."""
        found: Front = self.use(self.product(x, self.weight), *self.routing, self.dtype, *into)
        return found


class SeparateFront:
    """The router apart from gate and up, as one of them is quantised."""

    def __init__(
        self, moe: MoeArch, source: WeightSource, held: range | None, weights: Sequence[Weight]
    ) -> None:
        router, gate, up = weights
        self.product, self.route = source.ops.router, source.ops.route
        self.weight = source.prepared([router], self.product)
        self.routing = _routing(moe, source, held)
        self.gate_up = GateUp(source, gate, up)

    def __call__(self, x: Tensor, into: Slots = NOWHERE) -> Front:
        """Of x [T, D]."""
        weights, ids = self.route(self.product(x, self.weight), *self.routing, *into)
        return weights, ids, self.gate_up(x)


def _routing(moe: MoeArch, source: WeightSource, held: range | None) -> tuple[Any, ...]:
    """The arguments of `route` that follow the logits."""
    bias = source.vector("gate.e_score_correction_bias", moe.num_experts, torch.float32)
    return (
        bias,
        moe.experts_per_token,
        moe.num_groups,
        moe.groups_per_token,
        moe.normalise_weights,
        moe.scaling,
        held,
    )


class Moe:
    """sum over the chosen experts of weight * expert(x), plus shared_expert(x), plus the residual.

    Logits are fp32 and no product of theirs is rounded: the spread of the router's bias is a few
    bf16 steps, so that rounding would send tokens to other experts.

    `held`: the experts of this rank; the others' slots are dropped. None: all. `counts_all`: tokens
    are routed over all ranks, and whoever hands them to the experts drops slots.
    """

    def __init__(
        self,
        arch: ModelArch,
        source: WeightSource,
        held: range | None = None,
        counts_all: bool = False,
    ) -> None:
        moe, hidden, width = arch.moe, arch.hidden, arch.moe.shared_intermediate
        self.experts_op = source.ops.experts
        router = source.stored("gate", moe.num_experts, hidden)
        gate = source.stored("shared_experts.gate_proj", width, hidden)
        up = source.stored("shared_experts.up_proj", width, hidden)
        stored = (router, gate, up)
        counted = None if counts_all else held
        front = JoinedFront if source.can_join(stored) else SeparateFront
        self.front = front(moe, source, counted, stored)
        self.down = Linear(source, "shared_experts.down_proj", hidden, width)
        held = range(moe.num_experts) if held is None else held
        self.experts = source.at("experts").experts(held, moe.num_experts, hidden, moe.intermediate)

    def place_for(self, _num_rows: int) -> Tensor | None:
        """Where x [T, D] is to lie; None: anywhere."""
        return None

    def route(self, x: Tensor, is_padding: Tensor | None) -> Front:
        """Of x [T, D]. Rows that `is_padding` [T, 1] marks get no expert: they would read weights
        that nobody else needs."""
        weights, ids, hidden = self.front(x)
        if is_padding is not None:
            ids = ids.masked_fill(is_padding, -1)
        return weights, ids, hidden

    def __call__(self, x: Tensor, residual: Tensor, is_padding: Tensor | None = None) -> Hidden:
        """[T, D] and [T, D] to [T, D]: summed in fp32 by the experts' last kernel, rounded once."""
        weights, ids, hidden = self.route(x, is_padding)
        y: Tensor = self.experts_op(x, self.experts, ids, weights, self.down(hidden), residual)
        return y
