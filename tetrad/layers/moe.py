"""Mixture of experts: router, routed experts, shared expert."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.core.arch import ModelArch, MoeArch
from tetrad.layers.linear import Linear
from tetrad.layers.mlp import Mlp
from tetrad.layers.source import WeightSource


class Moe:
    """sum over the chosen experts of weight * expert(x), plus shared_expert(x), plus the residual.

    The router runs in fp32 from end to end: the spread of its bias is a few bf16 steps, so that
    rounding it would send tokens to other experts.
    """

    def __init__(self, arch: ModelArch, source: WeightSource) -> None:
        moe = arch.moe
        self.arch: MoeArch = moe
        self.ops = source.ops
        self.router = Linear(source, "gate", moe.num_experts, arch.hidden, torch.float32)
        self.bias = source.vector("gate.e_score_correction_bias", moe.num_experts, torch.float32)
        self.experts = source.at("experts").experts(moe.num_experts, arch.hidden, moe.intermediate)
        self.shared = Mlp(
            source.at("shared_experts"), arch.hidden, moe.intermediate * moe.num_shared
        )

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """[T, D] and [T, D] to [T, D]: summed in fp32 by the experts' last kernel, rounded once."""
        moe = self.arch
        weights, ids = self.ops.route(
            self.router(x.float()),
            self.bias,
            moe.experts_per_token,
            moe.num_groups,
            moe.groups_per_token,
            moe.normalise_weights,
            moe.scaling,
        )
        y: Tensor = self.ops.experts(x, self.experts, ids, weights, self.shared(x), residual)
        return y
