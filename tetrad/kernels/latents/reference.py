"""Latents and cached keys in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tetrad.formats import fp8_keys
from tetrad.kernels.backend import Backend
from tetrad.kernels.rms_norm.reference import run as rms_norm
from tetrad.kernels.rope.reference import run as rope


def run(  # noqa: PLR0913  # the contract's
    query: Tensor,
    key: Tensor,
    index_key: Tensor | None,
    query_weight: Tensor,
    key_weight: Tensor,
    index_weight: Tensor | None,
    index_bias: Tensor | None,
    eps: float,
    index_eps: float,
    cos: Tensor,
    sin: Tensor,
    index_interleaved: bool,
    slots: Tensor,
    pool: Tensor,
    index_pool: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """One after the other in fp32."""
    rank = len(key_weight)
    latent = rms_norm(query.float(), query_weight.float(), eps).to(query_weight.dtype)
    normed = rms_norm(key[:, :rank].float(), key_weight.float(), eps)
    turned = rope(key[:, None, rank:].float(), cos, sin, True).squeeze(1)
    is_fp8 = pool.dtype == torch.uint8
    if is_fp8:
        _store(pool, slots, fp8_keys.encode_latents(normed, turned))
    else:
        _store(pool, slots, torch.cat([normed, turned], dim=-1))
    if index_key is not None and index_weight is not None and index_pool is not None:
        normed = functional.layer_norm(
            index_key.float(), index_weight.shape, index_weight, index_bias, index_eps
        )
        turned = rope(normed.unsqueeze(1), cos, sin, index_interleaved).squeeze(1)
        if is_fp8:
            fp8_keys.store_index_keys(index_pool, slots, turned)
        else:
            _store(index_pool, slots, turned)
    return latent, pool, index_pool


def _store(pool: Tensor, slots: Tensor, rows: Tensor) -> None:
    pool.view(-1, pool.shape[-1]).index_copy_(0, slots, rows.to(pool.dtype))


BACKEND = Backend("torch", run)
