"""The functions in which training spends its time, and what replaces two of them on a GPU.

Shapes: B rows, T positions that ask, S positions that answer, H heads.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

NEVER = float("-inf")


def attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """Softmax attention over the allowed keys, [B, H, T, v_dim]. q is already scaled."""
    logits = (q @ k.transpose(-1, -2)).float().masked_fill(~allowed, NEVER)
    return logits.softmax(-1).to(v.dtype) @ v


def attend_fast(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """The same without writing the logits to memory."""
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        return F.scaled_dot_product_attention(q, k, v.to(q.dtype), attn_mask=allowed, scale=1.0)


def head_sum(q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
    """Where attention would look if it could see all, summed over heads, [B, T, S]."""
    logits = (q @ k.transpose(-1, -2)).float().masked_fill(~visible, NEVER)
    return logits.softmax(-1).sum(1)


def index_scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """Sum over heads of weight * relu(q . k), [B, T, S].

    q [B, H, T, d], k [B, S, d], weights [B, H, T].
    """
    dots = F.relu(q @ k[:, None].transpose(-1, -2))
    return (dots * weights[..., None]).sum(1, dtype=torch.float32)


def divergence(target: Tensor, scores: Tensor, visible: Tensor) -> Tensor:
    """KL from attention to the indexer's softmax, per position [B, T]."""
    target = target / target.sum(-1, keepdim=True)
    log_index = F.log_softmax(scores.masked_fill(~visible, NEVER), -1).masked_fill(~visible, 0.0)
    return (target * (target.clamp_min(1e-9).log() - log_index)).sum(-1)


def top_positions(scores: Tensor, num_keys: int) -> Tensor:
    """True at the highest scores of each row; of equal scores the lowest index wins."""
    if scores.shape[-1] <= num_keys:
        return torch.ones_like(scores, dtype=torch.bool)
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :num_keys]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)


def top_positions_fast(scores: Tensor, num_keys: int) -> Tensor:
    """For training: ties are broken by a nudge too small to reorder much else."""
    if scores.shape[-1] <= num_keys:
        return torch.ones_like(scores, dtype=torch.bool)
    nudged = scores - 1e-6 * torch.arange(scores.shape[-1], device=scores.device)
    lowest = nudged.topk(num_keys, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    return nudged >= lowest


@dataclass(frozen=True)
class Kernels:
    """What training computes faster than a reference does."""

    attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = attend
    top_positions: Callable[[Tensor, int], Tensor] = top_positions


FAST = Kernels(attend_fast, top_positions_fast)
