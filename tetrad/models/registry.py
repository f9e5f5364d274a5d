"""The architectures Tetrad serves."""

from __future__ import annotations

from collections.abc import Mapping

from tetrad.core.architectures import Arch
from tetrad.core.llama_arch import LlamaArch
from tetrad.layers.source import WeightSource
from tetrad.models.base import Model
from tetrad.models.deepseek_v32 import DeepseekV32
from tetrad.models.glm_moe_dsa import GlmMoeDsa
from tetrad.models.latent import LatentModel
from tetrad.models.llama import Llama

LATENT_MODELS: Mapping[str, type[LatentModel]] = {
    "glm_moe_dsa": GlmMoeDsa,
    "deepseek_v32": DeepseekV32,
}
MODELS: Mapping[str, type[Model]] = {**LATENT_MODELS, "llama": Llama}
"""`model_type` of config.json → class. The keys are `core.arch.MODEL_TYPES`."""


def build(arch: Arch, source: WeightSource) -> Model:
    """The model of these shapes, or what the rank of `source` has of it, filled."""
    if isinstance(arch, LlamaArch):
        return Llama(arch, source)
    return LATENT_MODELS[arch.model_type](source.others.ranks.arch_of(arch), source)
