"""Llama and what is built like it (`llama`): SmolLM2, TinyLlama, Llama 3.

Grouped-query attention over all keys and a gated MLP, in every layer.
"""

from __future__ import annotations

from tetrad.core.llama_arch import LlamaArch
from tetrad.layers.batch import ForwardBatch
from tetrad.layers.cache import KvCache
from tetrad.layers.embedding import Embedding
from tetrad.layers.llama_layer import LlamaHead, LlamaLayer
from tetrad.layers.norm import Hidden
from tetrad.layers.rope import HalfRope
from tetrad.layers.source import WeightSource
from tetrad.models.base import Model


class Llama(Model):
    """On one device."""

    arch: LlamaArch
    layers: list[LlamaLayer]

    def __init__(self, arch: LlamaArch, source: WeightSource) -> None:
        super().__init__(source)
        self.arch = arch
        inner = source.at("model")
        self.embed = Embedding(inner, "embed_tokens", arch.vocab, arch.hidden)
        self.layers = [
            LlamaLayer(arch, layer, inner.at(f"layers.{layer}")) for layer in range(arch.num_layers)
        ]
        self.rope = HalfRope(arch.rope, self.embed.table.device)
        self.output = LlamaHead(arch, source, self.embed.table)

    def forward(self, batch: ForwardBatch, cache: KvCache) -> Hidden:
        """[T, D]."""
        hidden: Hidden = self.embed(batch.token_ids)
        rotation = self.rope(batch.positions)
        for layer in self.layers:
            hidden = layer(hidden, batch, rotation, cache)
        return hidden
