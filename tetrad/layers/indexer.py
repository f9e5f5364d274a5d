"""The sparse indexer: a small scorer that chooses which keys attention reads (DeepSeek-V3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.core.arch import ModelArch
from tetrad.formats.weights import Weight
from tetrad.kernels.ragged import Ragged
from tetrad.layers.batch import ForwardBatch
from tetrad.layers.linear import Linear
from tetrad.layers.rope import Rotation
from tetrad.layers.source import WeightSource

KEY_NORM_EPS = 1e-6
"""The key norm's own, whatever the model's rms_norm_eps."""


class Indexer:
    """score[t, s] = sum over heads of w[t, h] * relu(q[t, h] . k[s]); the topk best are read.

    The first R columns of queries and keys carry the position. Keys are written by attention, along
    with its own. The published score has a factor (X * I) ** -0.5, which changes no choice.

    `weights`: the matrix of the heads' weights w, where attention's product of x does not hold it.
    """

    def __init__(self, arch: ModelArch, source: WeightSource, weights: Weight | None) -> None:
        self.arch = index = arch.indexer
        self.ops = source.ops
        self.queries = Linear(
            source, "wq_b", index.num_heads * index.head_dim, arch.mla.q_lora_rank
        )
        self.weights = None if weights is None else source.prepared([weights], source.ops.router)

    def __call__(
        self,
        x: Tensor,
        weights: Tensor | None,
        q_latent: Tensor,
        batch: ForwardBatch,
        rotation: Rotation,
        pool: Tensor,
    ) -> Tensor | None:
        """Choose keys for x [T, D], whose normed query latents are q_latent [T, Q] and whose heads'
        weights are fp32 [T, X], if attention has them.

        `pool` holds the step's index keys by now. Returns int32 [T, topk], or None when no sequence
        is longer than topk, so that every key is read anyway.
        """
        if batch.ragged.max_kv_len <= self.arch.topk:
            return None
        queries = self.queries(q_latent).view(-1, self.arch.num_heads, self.arch.head_dim)
        queries = self.ops.rope(queries, *rotation, self.arch.rope_interleaved)
        if weights is None:
            # In fp32 whatever they are stored in: rounding them flips choices near ties.
            weights = self.ops.router(x, self.weights)
        selected = [
            self._select(queries[rows], weights[rows], part, pool)
            for rows, part in batch.ragged.parts
        ]
        return selected[0] if len(selected) == 1 else torch.cat(selected)

    def _select(self, queries: Tensor, weights: Tensor, ragged: Ragged, pool: Tensor) -> Tensor:
        scores = self.ops.index_score(queries, weights, pool, ragged)
        selected: Tensor = self.ops.index_select(scores, self.arch.topk, ragged.seen)
        return selected
