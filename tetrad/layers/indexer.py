"""The sparse indexer: a small scorer that chooses which keys attention reads (DeepSeek-V3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.core.arch import ModelArch
from tetrad.kernels.ragged import Ragged
from tetrad.layers.batch import ForwardBatch
from tetrad.layers.linear import Linear
from tetrad.layers.norm import LayerNorm
from tetrad.layers.rope import Rotation
from tetrad.layers.source import WeightSource

KEY_NORM_EPS = 1e-6
"""The key norm's own, whatever the model's rms_norm_eps."""


class Indexer:
    """score[t, s] = sum over heads of w[t, h] * relu(q[t, h] . k[s]); the topk best are read.

    The first R columns of queries and keys carry the position.
    """

    def __init__(self, arch: ModelArch, source: WeightSource) -> None:
        index = arch.indexer
        self.arch = index
        self.rope_dim = arch.mla.rope_dim
        self.ops = source.ops
        self.queries = Linear(
            source, "wq_b", index.num_heads * index.head_dim, arch.mla.q_lora_rank
        )
        self.keys = Linear(source, "wk", index.head_dim, arch.hidden)
        self.key_norm = LayerNorm(source, "k_norm", index.head_dim, KEY_NORM_EPS)
        self.weights = Linear(source, "weights_proj", index.num_heads, arch.hidden, torch.float32)
        self.scale = (index.num_heads * index.head_dim) ** -0.5

    def __call__(
        self, x: Tensor, q_latent: Tensor, batch: ForwardBatch, rotation: Rotation, pool: Tensor
    ) -> Tensor | None:
        """Choose keys for x [T, D], whose normed query latents are q_latent [T, Q].

        Writes the step's index keys to `pool`. Returns int32 [T, topk], or None when no sequence
        is longer than topk, so that every key is read anyway.
        """
        keys = self.key_norm(self.keys(x)).unsqueeze(1)
        turned, rest = self._rotate(keys, rotation)
        self.ops.store_latent(pool, batch.slots, turned.squeeze(1), rest.squeeze(1))
        if batch.ragged.max_kv_len <= self.arch.topk:
            return None
        queries = self.queries(q_latent).view(-1, self.arch.num_heads, self.arch.head_dim)
        queries = torch.cat(self._rotate(queries, rotation), dim=-1)
        # Rounding these weights flips choices near ties, so they and their scale are fp32.
        weights = self.weights(x.float()) * self.scale
        selected = [
            self._select(queries[rows], weights[rows], part, pool)
            for rows, part in batch.ragged.parts
        ]
        return selected[0] if len(selected) == 1 else torch.cat(selected)

    def _select(self, queries: Tensor, weights: Tensor, ragged: Ragged, pool: Tensor) -> Tensor:
        scores = self.ops.index_score(queries, weights, pool, ragged)
        selected: Tensor = self.ops.index_select(scores, self.arch.topk, ragged.seen)
        return selected

    def _rotate(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """The rotated first columns of x [T, X, I], and the others as they are."""
        turned = self.ops.rope(x[..., : self.rope_dim], *rotation, self.arch.rope_interleaved)
        return turned, x[..., self.rope_dim :]
