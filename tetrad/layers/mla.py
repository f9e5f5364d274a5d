"""Multi-head latent attention, absorbed; whole prompts may expand keys and values instead.

All that multiplies x itself is one product where it is stored dense, and one launch makes the
latents of it and writes the keys; docs/kernels.md counts the launches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.core.arch import ModelArch
from tetrad.kernels.ragged import Ragged
from tetrad.layers import expanded
from tetrad.layers.batch import ForwardBatch, WholePrompts
from tetrad.layers.cache import KvCache
from tetrad.layers.indexer import KEY_NORM_EPS, Indexer
from tetrad.layers.linear import JoinedLinears, Linear
from tetrad.layers.rope import Rotation
from tetrad.layers.source import WeightSource


class MlaAttention:
    """One layer's attention (DeepSeek-V2, section 2.1; sparse as in DeepSeek-V3.2).

    A token's key is its latent c [C] and one rotary key [R] for all heads. Head h would expand them
    to k = W_UK[h] c and v = W_UV[h] c. Moving W_UK to the query, q . (W_UK c) = (W_UK^T q) . c, and
    W_UV behind the softmax, lets all heads attend to the latents themselves. A prompt that is
    computed whole takes fewer operations with k and v (`core/keys.py` counts them).
    """

    def __init__(self, arch: ModelArch, layer: int, source: WeightSource) -> None:
        mla = arch.mla
        self.arch, self.layer, self.ops = mla, layer, source.ops
        self.topk = arch.indexer.topk
        self.index_interleaved = arch.indexer.rope_interleaved
        self.indexer: Indexer | None = None
        self.front = self._front(arch, source)
        self.norms = self._norms(arch, source)
        query_width = mla.num_heads * (mla.nope_dim + mla.rope_dim)
        self.q_b = Linear(source, "q_b_proj", query_width, mla.q_lora_rank)
        self.o = Linear(source, "o_proj", arch.hidden, mla.num_heads * mla.v_dim)
        self.w_uk, self.w_uv = self._absorbable(source)

    def _front(self, arch: ModelArch, source: WeightSource) -> JoinedLinears:
        """Query latent, key and, with an indexer, its key and the weights of its heads: these only
        if joined, as they may not be rounded."""
        mla, index = arch.mla, arch.indexer
        stored = [
            source.stored("q_a_proj", mla.q_lora_rank, arch.hidden),
            source.stored("kv_a_proj_with_mqa", mla.latent_dim, arch.hidden),
        ]
        if self.layer in index.full_layers:
            owned = source.at("indexer")
            stored.append(owned.stored("wk", index.head_dim, arch.hidden))
            weights = owned.stored("weights_proj", index.num_heads, arch.hidden)
            is_joined = source.can_join([*stored, weights])
            self.indexer = Indexer(arch, owned, None if is_joined else weights)
            stored += [weights] if is_joined else []
        return JoinedLinears(source, stored)

    def _norms(
        self, arch: ModelArch, source: WeightSource
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, float, float]:
        """Weights and epsilons, as `latents` takes them."""
        query = source.vector("q_a_layernorm.weight", arch.mla.q_lora_rank)
        key = source.vector("kv_a_layernorm.weight", arch.mla.kv_lora_rank)
        weight = bias = None
        if self.indexer is not None:
            width = arch.indexer.head_dim
            weight, bias = (
                source.vector(f"indexer.k_norm.{name}", width, torch.float32)
                for name in ("weight", "bias")
            )
        return query, key, weight, bias, arch.norm_eps, KEY_NORM_EPS

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
        mla, pool = self.arch, cache.latent[self.layer]
        index_pool = cache.index_keys.get(self.layer)
        query, key, *of_index = self.front(x)
        q_latent, _, _ = self.ops.latents(
            query, key, of_index[0] if of_index else None, *self.norms, *rotation,
            self.index_interleaved, batch.slots, pool, index_pool,
        )  # fmt: skip
        if self.indexer is not None and index_pool is not None:
            weights = of_index[1] if len(of_index) > 1 else None
            selected = self.indexer(x, weights, q_latent, batch, rotation, index_pool)
        q = self.q_b(q_latent).view(-1, mla.num_heads, mla.nope_dim + mla.rope_dim)
        whole = batch.whole_prompts(self.topk)
        if whole is None:
            values = self._over_latents(q, rotation, batch.ragged, selected, pool)
        else:
            values = self._over_expanded(q, rotation, batch, whole, pool)
            if (rows := whole.first_row) > 0:
                before = Rotation(rotation.cos[:rows], rotation.sin[:rows])
                chosen = None if selected is None else selected[:rows]
                others = self._over_latents(q[:rows], before, whole.before, chosen, pool)
                values = torch.cat([others, values])
        return self.o(values.flatten(1)), selected

    def _over_latents(
        self,
        q: Tensor,
        rotation: Rotation,
        ragged: Ragged,
        selected: Tensor | None,
        pool: Tensor,
    ) -> Tensor:
        """q [T, H, N + R] to [T, H, O]."""
        mla = self.arch
        queries = self.ops.absorb(q, self.w_uk, *rotation)
        attended = self.ops.mla(
            queries, pool, ragged, selected, mla.softmax_scale, mla.kv_lora_rank
        )
        values: Tensor = self.ops.head_linear(attended, self.w_uv)
        return values

    def _over_expanded(
        self, q: Tensor, rotation: Rotation, batch: ForwardBatch, whole: WholePrompts, pool: Tensor
    ) -> Tensor:
        """The rows of `whole` of q [T, H, N + R], which are rotated in place, to [T', H, O]."""
        mla, rows = self.arch, slice(whole.first_row, None)
        q = q[rows]
        rotary = q[..., mla.nope_dim :]
        rotary.copy_(self.ops.rope(rotary, rotation.cos[rows], rotation.sin[rows], True))
        return expanded.attend(q, self.w_uk, self.w_uv, whole, batch.slots[rows], pool, mla)
