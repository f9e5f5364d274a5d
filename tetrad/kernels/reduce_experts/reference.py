"""Adding up experts in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.kernels.backend import Backend


def run(
    rows: Tensor,
    ids: Tensor,
    slot_weights: Tensor,
    shared: Tensor | None,
    residual: Tensor | None = None,
) -> Tensor:
    """Slot by slot in fp32."""
    num_tokens, num_slots = ids.shape
    by_slot = rows.view(num_tokens, num_slots, -1)
    total = torch.zeros_like(by_slot[:, 0], dtype=torch.float32)
    for slot in range(num_slots):
        is_dropped = ids[:, slot : slot + 1] < 0
        total += (by_slot[:, slot] * slot_weights[:, slot : slot + 1]).masked_fill(is_dropped, 0.0)
    for added in (shared, residual):
        if added is not None:
            total += added
    return total.to(rows.dtype)


BACKEND = Backend("torch", run)
