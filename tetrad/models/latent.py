"""The parts of models with latent attention, experts and perhaps several ranks."""

from __future__ import annotations

from tetrad.core.arch import ModelArch
from tetrad.layers.decoder import DecoderLayer
from tetrad.layers.rope import Rope
from tetrad.layers.source import WeightSource
from tetrad.layers.stages import beginning_of, end_of
from tetrad.models.base import Model


class LatentModel(Model):
    """`forward` is each model's own."""

    arch: ModelArch
    layers: list[DecoderLayer]

    def __init__(self, arch: ModelArch, source: WeightSource) -> None:
        super().__init__(source)
        self.arch = arch
        inner = source.at("model")
        self.embed = beginning_of(arch, source)
        self.layers = [
            DecoderLayer(arch, layer, inner.at(f"layers.{arch.first_layer + layer}"))
            for layer in range(arch.num_layers)
        ]
        self.rope = Rope(arch.rope, self.layers[0].attention_norm.weight.device)
        self.output = end_of(arch, source)
