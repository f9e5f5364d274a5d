"""GLM-5, 5.1, 5.2 and 5.3 (`glm_moe_dsa`).

Latent attention over sparsely chosen keys, a dense MLP in the first layers, sigmoid-routed experts
with one shared expert in the others. From 5.2 on, IndexShare: only some layers own an indexer, and
the layers after one read the keys it chose.
"""

from __future__ import annotations

from tetrad.layers.batch import ForwardBatch
from tetrad.layers.cache import KvCache
from tetrad.layers.norm import Hidden
from tetrad.models.latent import LatentModel


class GlmMoeDsa(LatentModel):
    """The choice of keys travels along the layers."""

    def forward(self, batch: ForwardBatch, cache: KvCache) -> Hidden:
        """[T, D]."""
        hidden: Hidden = self.embed(batch.token_ids)
        rotation = self.rope(batch.positions)
        selected = None
        for layer in self.layers:
            hidden, selected = layer(hidden, batch, rotation, cache, selected)
        return hidden
