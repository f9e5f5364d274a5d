"""Attention of whole prompts over keys and values expanded from their latents."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tetrad.core.arch import MlaArch
from tetrad.formats import fp8_keys
from tetrad.layers.batch import WholePrompts

FLASH_DTYPES = (torch.bfloat16, torch.float16)
MOST_FLASH_WIDTH, FLASH_WIDTH_STEP = 256, 8
"""What torch's flash attention takes, which computes prompts of any lengths in one launch: types,
and widths of keys, which those of values have to equal."""


def attend(
    queries: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    whole: WholePrompts,
    slots: Tensor,
    pool: Tensor,
    mla: MlaArch,
) -> Tensor:
    """`queries` [T, H, N + R] of whole prompts, rotated, to [T, H, O]; their keys lie at `slots`.

    Keys are read back from `pool`, so that FP8 keys are the same for a prompt and for what follows.
    """
    keys, values = _expanded(_latents(pool, slots, mla, queries.dtype), w_uk, w_uv, mla)
    if _is_for_flash(queries, mla):
        return _flash(queries, keys, values, whole, mla.softmax_scale)
    scale, attended = mla.softmax_scale, []
    of_each = (torch.split(part, list(whole.lens)) for part in (queries, keys, values))
    for parts in zip(*of_each, strict=True):
        q, k, v = (part.transpose(0, 1)[None] for part in parts)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        attended.append(out[0].transpose(0, 1))
    return torch.cat(attended)


def _is_for_flash(queries: Tensor, mla: MlaArch) -> bool:
    width = queries.shape[-1]
    fits = width <= MOST_FLASH_WIDTH and width % FLASH_WIDTH_STEP == 0 and mla.v_dim <= width
    return queries.is_cuda and queries.dtype in FLASH_DTYPES and fits


def _flash(
    queries: Tensor, keys: Tensor, values: Tensor, whole: WholePrompts, scale: float
) -> Tensor:
    """[T, H, O], all prompts in one launch. `varlen_attn` takes no scale before torch 2.12."""
    longest, width = max(whole.lens), values.shape[-1]
    values = functional.pad(values, (0, queries.shape[-1] - width))
    found: Tensor = torch.ops.aten._flash_attention_forward(
        queries, keys, values, whole.starts, whole.starts, longest, longest, 0.0, True, False,
        scale=scale,
    )[0]  # fmt: skip
    return found[..., :width]


def _latents(pool: Tensor, slots: Tensor, mla: MlaArch, dtype: torch.dtype) -> Tensor:
    """[T, C + R] of the step's tokens."""
    rows = pool.view(-1, pool.shape[-1]).index_select(0, slots)
    if rows.dtype == torch.uint8:
        rows = fp8_keys.decode_latents(rows, mla.kv_lora_rank)
    return rows.to(dtype)


def _expanded(latents: Tensor, w_uk: Tensor, w_uv: Tensor, mla: MlaArch) -> tuple[Tensor, Tensor]:
    """Keys [T, H, N + R] and values [T, H, O]: both products write where attention reads."""
    num_heads, nope, rank = w_uk.shape
    both = latents.new_empty(len(latents), num_heads, nope + mla.rope_dim + mla.v_dim)
    keys, values = both[..., : nope + mla.rope_dim], both[..., nope + mla.rope_dim :]
    latent = latents[:, :rank].expand(num_heads, -1, -1)
    torch.bmm(latent, w_uk.transpose(1, 2), out=keys[..., :nope].transpose(0, 1))
    torch.bmm(latent, w_uv, out=values.transpose(0, 1))
    keys[..., nope:] = latents[:, None, rank:]
    return keys, values
