"""Routing in plain torch. Sorts are stable and descending, so that ties go to the lower id."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.kernels.backend import Backend


def run(  # noqa: PLR0913  # the contract's
    logits: Tensor,
    bias: Tensor,
    experts_per_token: int,
    num_groups: int,
    groups_per_token: int,
    normalise: bool,
    scaling: float,
    held: range | None = None,
    weights_into: Tensor | None = None,
    ids_into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """DeepSeek-V3's auxiliary-loss-free routing; everything in fp32."""
    scores = logits.sigmoid()
    choice = scores + bias
    if num_groups > 1:
        choice = _best_groups_only(choice, num_groups, groups_per_token)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :experts_per_token]
    weights = scores.gather(1, ids)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    if held is not None:
        ids = (ids - held.start).masked_fill((ids < held.start) | (ids >= held.stop), -1)
    weights = weights * scaling
    return (
        weights if weights_into is None else weights_into.copy_(weights),
        ids if ids_into is None else ids_into.copy_(ids),
    )


def _best_groups_only(choice: Tensor, num_groups: int, groups_per_token: int) -> Tensor:
    """-inf outside the best groups; a group is as good as its two best experts together."""
    groups = choice.view(len(choice), num_groups, -1)
    merit = groups.topk(2, dim=-1).values.sum(-1)
    best = merit.sort(dim=-1, descending=True, stable=True).indices[:, :groups_per_token]
    is_kept = torch.zeros_like(merit, dtype=torch.bool).scatter_(1, best, True)
    return groups.masked_fill(~is_kept.unsqueeze(-1), -torch.inf).flatten(1)


BACKEND = Backend("torch", run)
