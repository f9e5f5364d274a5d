"""Makes the checkpoints in modelopt_tiny/: a tiny GLM-5 in bf16, and NVIDIA's exports of it.

Run once, by hand, in an environment that Tetrad itself never needs:

    pip install torch==2.13.0 transformers==5.17.0 nvidia-modelopt==0.47.0
    pip install accelerate requests datasets
    python make_modelopt_fixture.py modelopt_tiny

Weights are random (seed 0) with a few outliers and blocks of zeros, so that block scales cover a
wide range. Of `w4a16_all` only the metadata is kept. `expected.safetensors` holds the values of
some quantised weights of `nvfp4_all` as Model Optimizer's own NVFP4QTensor.dequantize gives them.
"""

# mypy: ignore-errors
# (Model Optimizer is not among the dependencies, so its types cannot be checked here.)

from __future__ import annotations

import copy
import sys
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from safetensors.torch import load_file, save_file
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

EXPORTS = {
    "nvfp4_all": mtq.NVFP4_DEFAULT_CFG,
    "w4a16_all": mtq.W4A16_NVFP4_CFG,
    "nvfp4_experts": mtq.NVFP4_EXPERTS_ONLY_CFG,
}
EXPECTED = ("layers.0.self_attn", "layers.1.mlp.experts.0", "layers.1.mlp.shared_experts")


def tiny_config() -> GlmMoeDsaConfig:
    """Two layers, one dense and one sparse, both with an indexer."""
    return GlmMoeDsaConfig(
        vocab_size=48,
        hidden_size=64,
        intermediate_size=48,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_shared_experts=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        index_topk=8,
        index_n_heads=2,
        index_head_dim=32,
        first_k_dense_replace=1,
        mlp_layer_types=["dense", "sparse"],
        indexer_types=["full", "full"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=256,
        pad_token_id=None,
        eos_token_id=1,
        bos_token_id=0,
    )


def tiny_model() -> GlmMoeDsaForCausalLM:
    """Random weights whose block scales differ by orders of magnitude."""
    torch.manual_seed(0)
    model = GlmMoeDsaForCausalLM(tiny_config())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                continue
            rows = torch.exp(torch.randn(parameter.shape[-2], 1))
            parameter.copy_(torch.randn(parameter.shape) * 0.05 * rows)
            parameter[..., 0, :16] = 0.0
            parameter[..., 1, 16:32] *= 1e-5
            parameter[..., -1, 3] *= 20.0
        for name, buffer in model.to(torch.bfloat16).named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.data = torch.randn(buffer.shape, dtype=torch.float32)
    return model.eval()


def export(source: Path, config: dict, folder: Path) -> None:
    """Quantise the model in `source`, calibrated on random tokens, and write it to `folder`."""
    torch.manual_seed(1)
    tokens = torch.randint(2, 48, (4, 32))
    model = GlmMoeDsaForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    quantized = mtq.quantize(model, copy.deepcopy(config), lambda m: m(tokens))
    with torch.inference_mode():
        export_hf_checkpoint(quantized, export_dir=folder)


def expected(folder: Path) -> dict[str, torch.Tensor]:
    """Module name → float32 values, by Model Optimizer's own arithmetic."""
    stored = load_file(folder / "model.safetensors")
    values = {}
    for name, codes in stored.items():
        if codes.dtype != torch.uint8 or not any(part in name for part in EXPECTED):
            continue
        shape = torch.Size((codes.shape[0], codes.shape[1] * 2))
        values[name.removesuffix(".weight")] = NVFP4QTensor(shape, torch.float32, codes).dequantize(
            dtype=torch.float32,
            scale=stored[f"{name}_scale"],
            double_scale=stored[f"{name}_scale_2"],
            block_sizes={-1: 16},
        )
    return values


def main(target: Path) -> None:
    """Write the source and every export under `target`."""
    tiny_model().save_pretrained(target / "bf16")
    for name, config in EXPORTS.items():
        export(target / "bf16", config, target / name)
    save_file(expected(target / "nvfp4_all"), target / "expected.safetensors")
    (target / "w4a16_all" / "model.safetensors").unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
