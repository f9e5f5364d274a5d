"""Hugging Face's models as the truth, with the settings under which they are one.

Three things in transformers 5.24 need care. The latent norms are built with eps 1e-6 whatever the
config says; engines serve with the config's. `torch.topk` breaks ties by length, so index heads are
many enough that exact ties do not occur. A pad token's embedding row is zeroed, which makes whole
rows of index scores tie, so there is no pad token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
)

SHAPES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_hidden_layers": 5,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 16,
    "max_position_embeddings": 4096,
    "pad_token_id": None,
    "attn_implementation": "eager",
}
"""Odd on purpose: value, nope and rotary widths all differ, ranks are not powers of two."""


def glm(**overrides: Any) -> Any:
    """GlmMoeDsaForCausalLM with an IndexShare schedule: 2 and 3 read what layer 1 chose."""
    config = GlmMoeDsaConfig(
        **SHAPES
        | {
            "rms_norm_eps": 1e-5,
            "indexer_types": ["full", "full", "shared", "shared", "full"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        }
        | overrides
    )
    return randomised(GlmMoeDsaForCausalLM(config))


def deepseek(**overrides: Any) -> Any:
    """A DeepseekV32ForCausalLM with experts in groups and a rotary embedding stretched by yarn."""
    config = DeepseekV32Config(
        **SHAPES
        | {
            "rms_norm_eps": 1e-3,
            "n_routed_experts": 12,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 40.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 0.7,
                "mscale_all_dim": 1.0,
            },
        }
        | overrides
    )
    return randomised(DeepseekV32ForCausalLM(config))


@torch.no_grad()
def randomised(model: Any, seed: int = 0) -> Any:
    """Weights large enough that every part matters, router bias and key-norm bias included."""
    generator = torch.Generator().manual_seed(seed)

    def fill(values: Tensor, std: float, mean: float = 0.0) -> None:
        values.copy_(torch.randn(values.shape, generator=generator) * std + mean)

    for name, values in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("e_score_correction_bias"):
            fill(values, 0.2)
        elif name.endswith("bias"):
            fill(values, 0.5)
        elif "norm" in name:
            fill(values, 0.2, mean=1.0)
        elif "embed_tokens" in name:
            fill(values, 0.5)
        elif values.dim() > 1:
            gain = 3.0 if "lm_head" in name else 1.0
            fill(values, gain * values.shape[-1] ** -0.5)
    for layer in model.model.layers:
        _make_eps_count(layer.self_attn, model.config)
    return model.eval()


def _make_eps_count(attention: Any, config: Any) -> None:
    """Set the latent norms' eps, and make what is normed small enough that each eps shows."""
    for norm in (attention.q_a_layernorm, attention.kv_a_layernorm):
        norm.variance_epsilon = config.rms_norm_eps
    small = 10.0 * config.rms_norm_eps**0.5
    attention.q_a_proj.weight.mul_(small)
    attention.kv_a_proj_with_mqa.weight[: config.kv_lora_rank].mul_(small)
    if attention.indexer is not None:
        attention.indexer.wk.weight.mul_(3e-3)


@torch.no_grad()
def logits(model: Any, token_ids: Tensor) -> Tensor:
    """fp32 [n, V] of one sequence computed at once."""
    out: Tensor = model(token_ids[None]).logits[0].float()
    return out


def save(model: Any, folder: Path) -> Path:
    """As a checkpoint folder."""
    model.save_pretrained(folder)
    return folder
