"""Multi-head latent attention, absorbed: keys and values are never expanded from their latents."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.core.arch import ModelArch
from tetrad.layers.batch import ForwardBatch
from tetrad.layers.cache import KvCache
from tetrad.layers.indexer import Indexer
from tetrad.layers.linear import Linear
from tetrad.layers.norm import RmsNorm
from tetrad.layers.rope import Rotation
from tetrad.layers.source import WeightSource


class MlaAttention:
    """One layer's attention (DeepSeek-V2, section 2.1; sparse as in DeepSeek-V3.2).

    A token's key is its latent c [C] and one rotary key [R] for all heads. Head h would expand them
    to k = W_UK[h] c and v = W_UV[h] c. Moving W_UK to the query, q . (W_UK c) = (W_UK^T q) . c, and
    W_UV behind the softmax, lets all heads attend to the latents themselves.
    """

    def __init__(self, arch: ModelArch, layer: int, source: WeightSource) -> None:
        mla, eps = arch.mla, arch.norm_eps
        self.arch = mla
        self.layer = layer
        self.ops = source.ops
        query_width = mla.num_heads * (mla.nope_dim + mla.rope_dim)
        self.q_a = Linear(source, "q_a_proj", mla.q_lora_rank, arch.hidden)
        self.q_a_norm = RmsNorm(source, "q_a_layernorm", mla.q_lora_rank, eps)
        self.q_b = Linear(source, "q_b_proj", query_width, mla.q_lora_rank)
        self.kv_a = Linear(source, "kv_a_proj_with_mqa", mla.latent_dim, arch.hidden)
        self.kv_a_norm = RmsNorm(source, "kv_a_layernorm", mla.kv_lora_rank, eps)
        self.o = Linear(source, "o_proj", arch.hidden, mla.num_heads * mla.v_dim)
        self.w_uk, self.w_uv = self._absorbable(source)
        self.indexer = (
            Indexer(arch, source.at("indexer")) if layer in arch.indexer.full_layers else None
        )

    def _absorbable(self, source: WeightSource) -> tuple[Tensor, Tensor]:
        """W_UK [H, N, C] and W_UV^T [H, C, O] of kv_b_proj, whose rows are [N | O] per head."""
        mla = self.arch
        rows = mla.num_heads * (mla.nope_dim + mla.v_dim)
        both = source.matrix("kv_b_proj", rows, mla.kv_lora_rank)
        per_head = both.view(mla.num_heads, -1, mla.kv_lora_rank)
        w_uk, w_uv = torch.split(per_head, [mla.nope_dim, mla.v_dim], dim=1)
        return w_uk.contiguous(), w_uv.transpose(1, 2).contiguous()

    def __call__(
        self,
        x: Tensor,
        batch: ForwardBatch,
        rotation: Rotation,
        cache: KvCache,
        selected: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """x [T, D] to [T, D], and the key choice for layers that share it.

        `selected` is the choice of the last layer with an indexer (int32 [T, topk], or None for all
        keys); a layer with its own replaces it. Writes the step's keys to `cache`.
        """
        q_latent = self.q_a_norm(self.q_a(x))
        if self.indexer is not None:
            pool = cache.index_keys[self.layer]
            selected = self.indexer(x, q_latent, batch, rotation, pool)
        self._store(x, batch, rotation, cache.latent[self.layer])
        attended = self.ops.mla(
            self._queries(q_latent, rotation),
            cache.latent[self.layer],
            batch.ragged,
            selected,
            self.arch.softmax_scale,
            self.arch.kv_lora_rank,
        )
        values = torch.bmm(attended.transpose(0, 1), self.w_uv)
        return self.o(values.transpose(0, 1).flatten(1)), selected

    def _queries(self, q_latent: Tensor, rotation: Rotation) -> Tensor:
        """Absorbed and rotated queries [T, H, C + R]."""
        mla = self.arch
        q = self.q_b(q_latent).view(-1, mla.num_heads, mla.nope_dim + mla.rope_dim)
        absorbed = torch.bmm(q[..., : mla.nope_dim].transpose(0, 1), self.w_uk).transpose(0, 1)
        turned = self.ops.rope(q[..., mla.nope_dim :], *rotation, True)
        return torch.cat([absorbed, turned], dim=-1)

    def _store(self, x: Tensor, batch: ForwardBatch, rotation: Rotation, pool: Tensor) -> None:
        """Write the latents and rotary keys of x."""
        kv = self.kv_a(x)
        latent = self.kv_a_norm(kv[:, : self.arch.kv_lora_rank])
        key = self.ops.rope(kv[:, None, self.arch.kv_lora_rank :], *rotation, True)
        self.ops.store_latent(pool, batch.slots, latent, key.squeeze(1))
