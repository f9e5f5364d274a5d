"""Tiny random Llama-like models: as a folder, and as a GGUF file as llama.cpp's converter writes
it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

TINY_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "vocab_size": 128,
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Heads together are wider than the hidden state, and three share a key."""

GGML_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Every tensor by its Hugging Face name, float32; gains keep logits of order 1 and more."""
    generator = torch.Generator().manual_seed(seed)
    hidden, width, inner = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }

    def matrix(out: int, width: int, gain: float = 1.0) -> Tensor:
        std: float = gain * width**-0.5
        return torch.randn(out, width, generator=generator) * std

    def scale() -> Tensor:
        return 1.0 + torch.randn(hidden, generator=generator) * 0.1

    made = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], hidden, 3.0),
        "model.norm.weight": scale(),
    }
    if not config["tie_word_embeddings"]:
        made["lm_head.weight"] = matrix(config["vocab_size"], hidden, 3.0)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, shape in shapes.items():
            made[f"{prefix}.{name}.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[f"{prefix}.{name}.weight"] = scale()
    return made


def tiny_llama_folder(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """A checkpoint folder; `overrides` replace keys of TINY_LLAMA."""
    config = TINY_LLAMA | overrides
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    save_file(tensors(config, seed), folder / "model.safetensors")
    return folder


def tiny_gguf(path: Path, types: Mapping[str, str], seed: int = 0, **overrides: Any) -> Path:
    """The same model as a GGUF file. `types`: ggml's name of a kind of tensor ("attn_q") → its
    type; others are F32."""
    import gguf

    config = TINY_LLAMA | overrides
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    add_vocabulary(writer)
    for name, values in tensors(config, seed).items():
        told = ggml_name(name)
        kind = types.get(told.split(".")[-2], "F32")
        data = as_ggml_orders(name, values, config["head_dim"]).numpy()
        if kind == "F32" or values.dim() == 1:
            writer.add_tensor(told, data)
        else:
            number = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(told, gguf.quants.quantize(data, number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def ggml_name(name: str) -> str:
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in top:
        return top[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{GGML_NAMES[rest.removesuffix('.weight')]}.weight"


def as_ggml_orders(name: str, values: Tensor, head_dim: int) -> Tensor:
    """As llama.cpp's convert_hf_to_gguf.py permutes queries and keys."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return values
    halves = values.view(-1, 2, head_dim // 2, values.shape[1])
    return halves.swapaxes(1, 2).reshape(values.shape).contiguous()


def vocabulary() -> tuple[list[str], list[int], list[str]]:
    """128 tokens, their types, and merges: three of control, one of a user, printable ASCII and
    some of two letters."""
    alphabet = [chr(i) for i in range(0x21, 0x7F)] + ["Ġ", "Ċ"]
    pairs = ["th", "in", "an", "er", "on", "re", "Ġt", "Ġa", "the", "ing", "Ġth", "12", "23"]
    merges = ["t h", "i n", "a n", "e r", "o n", "r e", "Ġ t", "Ġ a", "th e", "in g", "Ġ th"]
    merges += ["1 2", "2 3"]
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*control, "<mark>", *alphabet, *pairs]
    tokens += [f"unused{i}" for i in range(128 - len(tokens))]
    return tokens, [3] * 3 + [4] + [1] * 124, merges


def add_vocabulary(writer: Any) -> None:
    tokens, kinds, merges = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
