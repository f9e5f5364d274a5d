"""Check the training model against Hugging Face's `GlmMoeDsaForCausalLM` on the same fp32 weights.

    PYTHONPATH=. python examples/abacus/compare_hf.py tetrad/data/abacus [CHECKPOINT_FOLDER]

Without a checkpoint the weights are random. Hugging Face builds the two latent norms with eps 1e-6
whatever the config says; GLM-5 is served with rms_norm_eps, so the oracle is patched. It has no MTP
layer: those tensors are left out.
"""

import argparse
from pathlib import Path

import torch
from checkpoint import from_tensors, read_tensors, to_tensors
from model import Abacus, ModelConfig
from torch import Tensor

NUM_TOKENS = 200  # more than three times index_topk
TOLERANCE = 1e-3


def random_weights(model: Abacus) -> None:
    """Not only the matrices: norms and biases at their initial values would hide mistakes."""
    model.initialise(seed=1)
    generator = torch.Generator().manual_seed(2)
    for name, tensor in model.state_dict().items():
        if tensor.dim() == 1:
            scale = 0.02 if name.endswith("bias") else 0.2
            tensor.add_(torch.randn(tensor.shape, generator=generator) * scale)


def oracle_logits(folder: Path, tensors: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Logits of Hugging Face's model."""
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    config = GlmMoeDsaConfig.from_pretrained(folder)
    mtp = f"model.layers.{config.num_hidden_layers}."
    config.quantization_config = None
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(mtp)}
    oracle = GlmMoeDsaForCausalLM.from_pretrained(
        None, config=config, state_dict=kept, dtype=torch.float32, attn_implementation="eager"
    )
    for layer in oracle.model.layers:
        attention = layer.self_attn
        for norm in (attention.q_a_layernorm, attention.kv_a_layernorm):
            norm.variance_epsilon = config.rms_norm_eps
    with torch.no_grad():
        return oracle.eval()(ids).logits


def main() -> None:
    """Print the largest difference and fail if it is not rounding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where config.json is")
    parser.add_argument("checkpoint", type=Path, nargs="?")
    arguments = parser.parse_args()
    model = Abacus(ModelConfig.load(arguments.folder)).eval()
    if arguments.checkpoint is None:
        random_weights(model)
    else:
        from_tensors(read_tensors(arguments.checkpoint), model)
    ids = torch.randint(0, model.config.vocab_size, (2, NUM_TOKENS), generator=torch.manual_seed(3))
    ids[ids == 491] = 0
    with torch.no_grad():
        ours = model(ids).logits
        model.sparse = False
        dense = model(ids).logits
    theirs = oracle_logits(arguments.folder, to_tensors(model, torch.float32), ids)
    difference = (ours - theirs).abs().max().item()
    effect = (ours - dense).abs().max().item()
    print(f"max |ours - Hugging Face's| {difference:.2e}; sparsity changes logits by {effect:.2e}")
    if difference > TOLERANCE:
        raise SystemExit("the training model does not compute what Hugging Face's does")


if __name__ == "__main__":
    main()
