"""Shapes of published models, so that tools can speak of them without a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tetrad.core.arch import ModelArch
from tetrad.core.architectures import Arch, arch_of, arch_of_config
from tetrad.core.errors import ConfigError, nearest
from tetrad.core.gguf import is_gguf
from tetrad.core.jsonfile import read_json_object

_GLM_5: Mapping[str, Any] = {
    "model_type": "glm_moe_dsa",
    "vocab_size": 154880,
    "hidden_size": 6144,
    "num_hidden_layers": 78,
    "num_nextn_predict_layers": 1,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "index_topk": 2048,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "indexer_rope_interleave": True,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 202752,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "eos_token_id": [154820, 154827, 154829],
}

_CONFIGS: Mapping[str, Mapping[str, Any]] = {"glm-5": _GLM_5}

PRESETS: tuple[str, ...] = tuple(_CONFIGS)
"""Names that `preset` knows."""


def preset(name: str) -> ModelArch:
    """The shapes of one of `PRESETS`."""
    return ModelArch.from_config(dict(_CONFIGS[name]))


def shapes_of(model: str) -> Arch:
    """The shapes of a preset, a model folder or a config.json. Raises ConfigError where there is no
    such thing."""
    if model in PRESETS:
        return preset(model)
    path = Path(model)
    if path.is_file() and not is_gguf(path):
        return arch_of_config(read_json_object(path))
    if path.exists():
        return arch_of(path)
    raise ConfigError(
        f"--model {model}: there is no such file or folder, and no preset of that name; there is "
        f"{', '.join(PRESETS)}.{nearest(model, PRESETS)}"
    )


def served_shapes(model: Path, load_format: str) -> Arch:
    """The shapes of what is served: where no weights are read, no folder with some is needed."""
    return shapes_of(str(model)) if load_format != "auto" else arch_of(model)
