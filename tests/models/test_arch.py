"""Shapes read from config.json: the released models, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.factories import TINY_GLM
from tetrad.core.arch import ModelArch, full_indexer_layers
from tetrad.core.errors import CheckpointError
from tetrad.core.keys import FP8
from tetrad.core.step import PAGE_TOKENS
from tetrad.layers.cache import KvCache
from tetrad.layers.rope import inverse_frequencies

GLM_5_2: dict[str, Any] = {
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
    "head_dim": 192,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "index_topk": 2048,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "index_topk_pattern": None,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1048576,
    "rope_parameters": {"rope_theta": 8_000_000, "rope_type": "default"},
    "eos_token_id": [154820, 154827, 154829],
}
DEEPSEEK_V3_2: dict[str, Any] = GLM_5_2 | {
    "model_type": "deepseek_v32",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "index_n_heads": 64,
    "index_topk_freq": None,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 163840,
    "rope_parameters": None,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


def test_glm_5_2():
    arch = ModelArch.from_config(GLM_5_2)
    assert arch.indexer.full_layers == (0, 1, *range(2, 78, 4))
    assert len(arch.indexer.full_layers) == 21
    assert arch.indexer.rope_interleaved
    assert arch.mla.softmax_scale == 0.0625
    assert arch.rope.theta == 8e6
    assert arch.rope.dim == 64
    bytes_per_token = 78 * (512 + 64) * 2 + 21 * 128 * 2
    assert KvCache.bytes_per_page(arch, torch.bfloat16) == bytes_per_token * PAGE_TOKENS
    assert KvCache.bytes_per_page(arch, torch.bfloat16, FP8) == (78 * 656 + 21 * 132) * PAGE_TOKENS


def test_deepseek_v3_2():
    arch = ModelArch.from_config(DEEPSEEK_V3_2)
    assert arch.indexer.full_layers == tuple(range(61))
    assert not arch.indexer.rope_interleaved
    assert (arch.moe.num_groups, arch.moe.groups_per_token) == (8, 4)
    assert arch.mla.softmax_scale == pytest.approx(192**-0.5 * 1.3688879**2)
    assert arch.rope.yarn is not None
    assert arch.rope.yarn.rotation_scale == 1.0


def test_yarn_keeps_fast_pairs_and_slows_the_slow_ones():
    arch = ModelArch.from_config(DEEPSEEK_V3_2).rope
    plain = 10000.0 ** (-torch.arange(0, 64, 2) / 64)
    ratio = inverse_frequencies(arch) / plain
    # Pair 10 is the last that turns 32 times in 4096 tokens, pair 23 the first that does not once.
    blend = torch.arange(14) / 13
    expected = torch.cat([torch.ones(10), 1 - blend + blend / 40, torch.full((8,), 1 / 40)])
    torch.testing.assert_close(ratio, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"indexer_types": ["full", "shared", "full"], "index_topk_pattern": "FFF"}, (0, 2)),
        ({"index_topk_pattern": "FFSS", "index_topk_freq": 1}, (0, 1)),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 2}, (0, 1, 3)),
        ({}, (0, 1, 2, 3)),
    ],
)
def test_where_the_indexer_schedule_comes_from(config: dict[str, Any], expected: tuple[int, ...]):
    num_layers = len(config.get("indexer_types", "four"))
    assert full_indexer_layers(config, num_layers) == expected


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model_type": "glm_moe_dsd"}, "Did you mean 'glm_moe_dsa'"),
        ({"indexer_types": ["full"]}, "covers 1 of 4 layers"),
        ({"indexer_types": ["shared", "full", "full", "full"]}, "first entry must be a full"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta; it is never guessed"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}}, "'longrope' is not"),
        ({"scoring_func": "softmax"}, "'sigmoid' is"),
        ({"n_group": 3}, "8 experts do not form 3 equal groups"),
        ({"n_group": 8}, "8 experts do not form 8 equal groups"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number, found '64'"),
        ({"kv_lora_rank": None}, "lacks kv_lora_rank"),
        ({"eos_token_id": [1, 60_000]}, "eos_token_id is 60000, and the model's vocabulary of"),
        ({"eos_token_id": -1}, "config.json: eos_token_id is -1, and the model's vocabulary of"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a whole number, found '</s>'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number, found nan"),
    ],
)
def test_what_is_refused(change: dict[str, Any], told: str):
    with pytest.raises(CheckpointError) as error:
        ModelArch.from_config(TINY_GLM | change)
    assert told in str(error.value)
