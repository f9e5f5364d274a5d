"""The architectures Tetrad serves."""

from __future__ import annotations

from collections.abc import Mapping

from tetrad.models.base import Model
from tetrad.models.deepseek_v32 import DeepseekV32
from tetrad.models.glm_moe_dsa import GlmMoeDsa

MODELS: Mapping[str, type[Model]] = {"glm_moe_dsa": GlmMoeDsa, "deepseek_v32": DeepseekV32}
"""`model_type` of config.json → class. The keys are `core.arch.MODEL_TYPES`."""
