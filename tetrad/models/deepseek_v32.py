"""DeepSeek-V3.2 (`deepseek_v32`).

The same blocks as GLM-5 with other numbers: experts are routed within groups, yarn stretches the
rotary angles, and the indexer rotates half-split pairs where attention rotates neighbours. Every
layer owns an indexer, so no choice of keys is handed on.
"""

from __future__ import annotations

from tetrad.layers.batch import ForwardBatch
from tetrad.layers.cache import KvCache
from tetrad.layers.norm import Hidden
from tetrad.models.latent import LatentModel


class DeepseekV32(LatentModel):
    """Each layer chooses its own keys."""

    def forward(self, batch: ForwardBatch, cache: KvCache) -> Hidden:
        """[T, D]."""
        hidden: Hidden = self.embed(batch.token_ids)
        rotation = self.rope(batch.positions)
        for layer in self.layers:
            hidden, _ = layer(hidden, batch, rotation, cache)
        return hidden
