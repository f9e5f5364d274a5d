"""Top-k with a defined tie-break in plain torch.

`torch.topk` leaves open which of equal scores it takes, and the answer would depend on the row's
length, so on how a prompt was cut into chunks. Here score and position become one integer: the
score's bits, reordered so that integers compare like the floats, above the inverted position. No
two are equal.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tetrad.kernels.backend import Backend

_POSITIONS = (1 << 32) - 1


def run(scores: Tensor, topk: int, seen: Tensor) -> Tensor:
    """Best first; -1 fills what is missing."""
    num_keys = scores.shape[-1]
    position = torch.arange(num_keys, device=scores.device)
    scores = scores.masked_fill(position >= seen[:, None], -torch.inf)
    # A NaN must be chosen, or what follows would look healthy. Adding 0.0 makes -0.0 and 0.0 tie.
    bits = (torch.where(scores.isnan(), torch.inf, scores) + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    inverted = _POSITIONS - position
    best = torch.topk((ordered << 32) | inverted, min(topk, num_keys), dim=-1).values
    positions = _POSITIONS - (best & _POSITIONS)
    is_seen = (best >> 32) > _MINUS_INFINITY
    selected = torch.where(is_seen, positions, -1).int()
    return functional.pad(selected, (0, topk - selected.shape[-1]), value=-1)


_MINUS_INFINITY = -0x7F800001
"""-inf after the reordering of its bits (0xFF800000)."""

BACKEND = Backend("torch", run)
