"""Routing and activation in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.kernels.activation.reference import run as activation
from tetrad.kernels.backend import Backend
from tetrad.kernels.route.reference import run as route


def run(  # noqa: PLR0913  # the contract's
    joined: Tensor,
    bias: Tensor,
    experts_per_token: int,
    num_groups: int,
    groups_per_token: int,
    normalise: bool,
    scaling: float,
    held: range | None = None,
    dtype: torch.dtype = torch.float32,
    weights_into: Tensor | None = None,
    ids_into: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One after the other."""
    num_experts = len(bias)
    gate, up = joined[:, num_experts:].chunk(2, dim=-1)
    weights, ids = route(
        joined[:, :num_experts], bias, experts_per_token, num_groups, groups_per_token,
        normalise, scaling, held, weights_into, ids_into,
    )  # fmt: skip
    return weights, ids, activation(gate, up).to(dtype)


BACKEND = Backend("torch", run)
