"""Tiny random checkpoints, written in milliseconds: everything a GLM-5 has, nothing learnt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

TINY_GLM: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "dtype": "float32",
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 0,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    # With few index heads, equal scores (all heads cut by the ReLU) are common; with 16 they are
    # not, so that other implementations choose the same keys.
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 16,
    "indexer_rope_interleave": True,
    "indexer_types": ["full", "full", "shared", "full"],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "attention_bias": False,
    "eos_token_id": [1],
    "pad_token_id": None,
}
"""config.json of the tiny model. The schedule has a shared layer; top-k is shorter than a page."""


def tiny_glm_folder(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write config.json and model.safetensors (float32) of a random tiny GLM-5 into `folder`.

    `overrides` replace keys of TINY_GLM; shapes follow. Returns `folder`, made when missing.
    """
    config = TINY_GLM | overrides
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    save_file(tiny_glm_tensors(config, seed), folder / "model.safetensors")
    return folder


def tiny_glm_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Every tensor of the checkpoint by its Hugging Face name, float32."""
    make = _Maker(seed)
    make.matrix("model.embed_tokens", config["vocab_size"], config["hidden_size"], gain=5.0)
    make.matrix("lm_head", config["vocab_size"], config["hidden_size"], gain=3.0)
    make.scale("model.norm.weight", config["hidden_size"])
    for layer in range(config["num_hidden_layers"]):
        _layer(make, config, layer)
    return make.tensors


class _Maker:
    """Draws tensors from one generator. Gains near 1 keep activations of order 1."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, Tensor] = {}

    def normal(self, name: str, *shape: int, std: float) -> None:
        self.tensors[name] = torch.randn(*shape, generator=self.generator) * std

    def matrix(self, module: str, out: int, width: int, gain: float = 1.0) -> None:
        self.normal(f"{module}.weight", out, width, std=gain * width**-0.5)

    def scale(self, name: str, width: int) -> None:
        self.normal(name, width, std=0.1)
        self.tensors[name] += 1.0

    def mlp(self, module: str, width: int, intermediate: int) -> None:
        self.matrix(f"{module}.gate_proj", intermediate, width)
        self.matrix(f"{module}.up_proj", intermediate, width)
        self.matrix(f"{module}.down_proj", width, intermediate)


def _layer(make: _Maker, config: dict[str, Any], layer: int) -> None:
    prefix, hidden = f"model.layers.{layer}", config["hidden_size"]
    make.scale(f"{prefix}.input_layernorm.weight", hidden)
    make.scale(f"{prefix}.post_attention_layernorm.weight", hidden)
    _attention(make, config, f"{prefix}.self_attn")
    if config["indexer_types"][layer] == "full":
        _indexer(make, config, f"{prefix}.self_attn.indexer")
    if layer < config["first_k_dense_replace"]:
        make.mlp(f"{prefix}.mlp", hidden, config["intermediate_size"])
    else:
        _moe(make, config, f"{prefix}.mlp")


def _attention(make: _Maker, config: dict[str, Any], prefix: str) -> None:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    query, latent = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, value = (
        config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    make.matrix(f"{prefix}.q_a_proj", query, hidden)
    make.scale(f"{prefix}.q_a_layernorm.weight", query)
    make.matrix(f"{prefix}.q_b_proj", heads * (nope + rope), query, gain=2.0)
    make.matrix(f"{prefix}.kv_a_proj_with_mqa", latent + rope, hidden)
    make.scale(f"{prefix}.kv_a_layernorm.weight", latent)
    make.matrix(f"{prefix}.kv_b_proj", heads * (nope + value), latent)
    make.matrix(f"{prefix}.o_proj", hidden, heads * value)


def _indexer(make: _Maker, config: dict[str, Any], prefix: str) -> None:
    heads, width, hidden = config["index_n_heads"], config["index_head_dim"], config["hidden_size"]
    make.matrix(f"{prefix}.wq_b", heads * width, config["q_lora_rank"])
    make.matrix(f"{prefix}.wk", width, hidden)
    make.scale(f"{prefix}.k_norm.weight", width)
    make.normal(f"{prefix}.k_norm.bias", width, std=0.1)
    make.matrix(f"{prefix}.weights_proj", heads, hidden)


def _moe(make: _Maker, config: dict[str, Any], prefix: str) -> None:
    hidden, width = config["hidden_size"], config["moe_intermediate_size"]
    make.matrix(f"{prefix}.gate", config["n_routed_experts"], hidden)
    make.normal(f"{prefix}.gate.e_score_correction_bias", config["n_routed_experts"], std=0.1)
    for expert in range(config["n_routed_experts"]):
        make.mlp(f"{prefix}.experts.{expert}", hidden, width)
    make.mlp(f"{prefix}.shared_experts", hidden, width * config["n_shared_experts"])
