"""The shapes of a model in a GGUF file, from its metadata."""

from __future__ import annotations

from tetrad.core.arch import RopeArch, token_id
from tetrad.core.errors import CheckpointError
from tetrad.core.gguf import GgufFile
from tetrad.core.llama_arch import GqaArch, LlamaArch

END_TOKENS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
"""Tokens that end an answer wherever they are control tokens, whatever eos_token_id says."""
CONTROL = 3
"""Token type of a control token."""


def arch_of_gguf(file: GgufFile) -> LlamaArch:
    """Of a file whose architecture is llama. Raises CheckpointError with a sentence."""
    name = file.get("general.architecture", str)
    if name != "llama":
        raise CheckpointError(
            f"{file.path} holds a model of architecture {name!r}; of GGUF files Tetrad serves "
            f"'llama'."
        )
    if "rope_freqs.weight" in file.tensors or file.metadata.get(
        "llama.rope.scaling.type", "none"
    ) not in ("none", ""):
        raise CheckpointError(
            f"{file.path} stretches its rotary embedding, which is not read from GGUF; the same "
            "model as safetensors with rope type 'llama3' works."
        )
    if file.metadata.get("llama.expert_count", 0):
        raise CheckpointError(
            f"{file.path} holds a model with experts, which is not read from GGUF; the same model "
            "as safetensors may work."
        )
    hidden = file.get("llama.embedding_length", int)
    heads = file.get("llama.attention.head_count", int)
    head_dim = file.get("llama.attention.key_length", int, hidden // max(heads, 1))
    rotated = file.get("llama.rope.dimension_count", int, head_dim)
    if rotated != head_dim:
        raise CheckpointError(
            f"{file.path} rotates {rotated} of {head_dim} numbers of a head; all are supported."
        )
    context = file.get("llama.context_length", int)
    theta = file.get("llama.rope.freq_base", float, 10_000.0)
    vocab = _vocab(file)
    if file.metadata.get("tokenizer.ggml.add_bos_token", False):
        _token_id(file, "tokenizer.ggml.bos_token_id", vocab)
    return LlamaArch(
        num_layers=file.get("llama.block_count", int),
        hidden=hidden,
        vocab=vocab,
        intermediate=file.get("llama.feed_forward_length", int),
        norm_eps=file.get("llama.attention.layer_norm_rms_epsilon", float),
        max_position=context,
        rope=RopeArch(theta, head_dim, context),
        gqa=GqaArch(heads, file.get("llama.attention.head_count_kv", int, heads), head_dim),
        is_tied="output.weight" not in file.tensors,
        eos_ids=_eos_ids(file, vocab),
    )


def _vocab(file: GgufFile) -> int:
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise CheckpointError(f"{file.path} lacks the tensor 'token_embd.weight'.")
    return table.shape[0]


def _token_id(file: GgufFile, key: str, vocab: int) -> int:
    return token_id(file.get(key, int), vocab, f"{file.path}: {key}")


def _eos_ids(file: GgufFile, vocab: int) -> tuple[int, ...]:
    """What the metadata names, and the control tokens that llama.cpp takes for an end, too."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    found = [_token_id(file, key, vocab) for key in keys if key in file.metadata]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    kinds = file.metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(kinds, list):
        pairs = zip(tokens, kinds, strict=False)
        found += [
            i
            for i, (token, kind) in enumerate(pairs)
            if i < vocab and kind == CONTROL and token in END_TOKENS
        ]
    return tuple(dict.fromkeys(found))
