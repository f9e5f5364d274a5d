"""Attention of whole prompts over keys and values expanded from their latents."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tetrad.core.arch import MlaArch
from tetrad.core.keys import is_expanded
from tetrad.formats import fp8_keys
from tetrad.layers.batch import ForwardBatch


def reads_expanded(batch: ForwardBatch, selected: Tensor | None) -> bool:
    """Is this the cheaper way for the step? Decided on the host, from its shape."""
    return selected is None and is_expanded(batch.query_lens, batch.kv_lens_host)


def attend(
    queries: Tensor, w_uk: Tensor, w_uv: Tensor, batch: ForwardBatch, pool: Tensor, mla: MlaArch
) -> Tensor:
    """`queries` [T, H, N + R], rotated, to [T, H, O].

    Keys are read back from `pool`, so that FP8 keys are the same for a prompt and for what follows.
    """
    keys, values = _expanded(_latents(pool, batch.slots, mla, queries.dtype), w_uk, w_uv, mla)
    attended, start = [], 0
    for count in batch.query_lens:
        rows = slice(start, start + count)
        q, k, v = (part[rows].transpose(0, 1)[None] for part in (queries, keys, values))
        out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=mla.softmax_scale
        )
        attended.append(out[0].transpose(0, 1))
        start += count
    return torch.cat(attended)


def _latents(pool: Tensor, slots: Tensor, mla: MlaArch, dtype: torch.dtype) -> Tensor:
    """[T, C + R] of the step's tokens."""
    rows = pool.view(-1, pool.shape[-1]).index_select(0, slots)
    if rows.dtype == torch.uint8:
        rows = fp8_keys.decode_latents(rows, mla.kv_lora_rank)
    return rows.to(dtype)


def _expanded(latents: Tensor, w_uk: Tensor, w_uv: Tensor, mla: MlaArch) -> tuple[Tensor, Tensor]:
    """Keys [T, H, N + R] and values [T, H, O]."""
    shape = (len(w_uk), *latents.shape)
    latent = latents.expand(shape)[..., : mla.kv_lora_rank]
    rotary = latents.expand(shape)[..., mla.kv_lora_rank :]
    keys = torch.cat([torch.bmm(latent, w_uk.transpose(1, 2)), rotary], dim=-1)
    return keys.transpose(0, 1), torch.bmm(latent, w_uv).transpose(0, 1)
