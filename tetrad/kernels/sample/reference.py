"""Sampling in plain torch: sort once, filter by rank and by running sum, put back in order of ids,
invert the running sum.

A row's token depends on that row alone, so it does not matter what else is in the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.kernels.backend import Backend


def run(
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    uniform: Tensor | None = None,
) -> Tensor:
    """`temperature` None means all greedy, and the others are not read. Otherwise all are given."""
    greedy = logits.argmax(dim=-1)
    if temperature is None:
        return greedy
    assert top_k is not None
    assert top_p is not None
    assert min_p is not None
    assert uniform is not None
    is_greedy = temperature == 0
    ranked, ids = logits.sort(dim=-1, descending=True, stable=True)
    scaled = ranked.double() / torch.where(is_greedy, 1.0, temperature).double().unsqueeze(1)
    kept = _filter(scaled.softmax(dim=-1), top_k, top_p.double(), min_p.double())
    by_id = torch.empty_like(kept).scatter_(1, ids, kept)
    reached = by_id.cumsum(dim=-1)
    target = uniform.double().unsqueeze(1) * reached[:, -1:]
    found = torch.searchsorted(reached, target, right=True).squeeze(1)
    last = ids.where(kept > 0, 0).amax(dim=-1)
    return torch.where(is_greedy, greedy, found.minimum(last))


def _filter(probabilities: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Zero what the three rules drop, in this order, each on what the one before left.

    `probabilities` [R, V] fall along a row, so what is kept is always a first stretch of it.
    """
    rank = torch.arange(probabilities.shape[1], device=probabilities.device)
    limit = torch.where(top_k > 0, top_k, probabilities.shape[1]).unsqueeze(1)
    kept = torch.where(rank < limit, probabilities, 0.0)
    running = kept.cumsum(dim=-1)
    is_reached_before = (running - kept) >= top_p.unsqueeze(1) * running[:, -1:]
    kept = kept.masked_fill(is_reached_before, 0.0)
    return kept.masked_fill(kept < min_p.unsqueeze(1) * kept[:, :1], 0.0)


BACKEND = Backend("torch", run)
