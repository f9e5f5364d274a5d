"""Absorbed latent attention in plain torch.

Without a selection, padded blocks of sequences attend to all their keys. With one, each row gathers
its own few keys, in chunks that bound the copy. FP8 keys are decoded as they are gathered.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.formats import fp8_keys
from tetrad.kernels.backend import Backend
from tetrad.kernels.ragged import Ragged

MAX_GATHERED_NUMBERS = 1 << 26
"""Bounds the gathered latents of one chunk of rows: 256 MiB in fp32."""


def run(
    queries: Tensor,
    pool: Tensor,
    ragged: Ragged,
    selected: Tensor | None,
    scale: float,
    latent_rank: int,
) -> Tensor:
    """fp32 inside, one rounding at the end."""
    flat = pool.view(-1, pool.shape[-1])
    if selected is not None:
        return _over_selected(queries, flat, ragged, selected, scale, latent_rank)
    out = queries.new_zeros(*queries.shape[:2], latent_rank)
    for block in ragged.blocks:
        keys = _gather(flat, block.slots, latent_rank)
        hidden = block.hidden.unsqueeze(2)
        attended = _attend(block.gather(queries), keys, hidden, scale, latent_rank)
        block.scatter(attended.to(out.dtype), out)
    return out


def _over_selected(
    queries: Tensor, flat: Tensor, ragged: Ragged, selected: Tensor, scale: float, latent_rank: int
) -> Tensor:
    slots = ragged.row_slots(selected.clamp(min=0).long())
    missing = (selected < 0)[:, None, None]
    size = max(1, MAX_GATHERED_NUMBERS // (selected.shape[1] * queries.shape[-1]))
    done = [
        _attend(q.unsqueeze(1), _gather(flat, s, latent_rank), m, scale, latent_rank).squeeze(1)
        for q, s, m in zip(
            *(torch.split(part, size) for part in (queries, slots, missing)), strict=True
        )
    ]
    found = done[0] if len(done) == 1 else torch.cat(done)
    return found.masked_fill(missing.all(-1), 0.0).to(queries.dtype)


def _gather(flat: Tensor, slots: Tensor, latent_rank: int) -> Tensor:
    """fp32 [G, M, C + R]."""
    rows = flat.index_select(0, slots.flatten()).view(*slots.shape, -1)
    return fp8_keys.decode_latents(rows, latent_rank) if rows.dtype == torch.uint8 else rows.float()


def _attend(
    queries: Tensor, keys: Tensor, hidden: Tensor, scale: float, latent_rank: int
) -> Tensor:
    """`queries` [G, Q, H, C + R] over `keys` [G, M, C + R]; `hidden` broadcasts to [G, Q, H, M].

    Returns fp32 [G, Q, H, C].
    """
    num_groups, num_rows, num_heads, _ = queries.shape
    scores = torch.bmm(queries.float().flatten(1, 2), keys.transpose(1, 2)) * scale
    scores = scores.view(num_groups, num_rows, num_heads, -1).masked_fill_(hidden, -torch.inf)
    weights = scores.softmax(-1)
    attended = torch.bmm(weights.flatten(1, 2), keys[..., :latent_rank])
    return attended.view(num_groups, num_rows, num_heads, latent_rank)


BACKEND = Backend("torch", run)
