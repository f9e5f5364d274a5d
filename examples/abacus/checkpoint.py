"""Between the training model and checkpoints with Hugging Face's names.

    PYTHONPATH=. python examples/abacus/checkpoint.py BF16_FOLDER OUT_FOLDER

packs the routed experts of a bf16 checkpoint as ModelOpt NVFP4 (weights only). `tetrad quantize`
does the same; this one shares no code with it, so that each checks the other: their tensors are
equal bit for bit.
"""

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from model import Abacus
from nvfp4 import dequantise, global_scale, quantise
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

STACKED = re.compile(r"(.*\.mlp\.experts)\.(gate_proj|up_proj|down_proj)")
SPLIT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
FP32_NAMES = ("e_score_correction_bias",)
TEXT_FILES = (
    "chat_template.jinja",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
PRODUCER = {"name": "tetrad-abacus", "version": "1"}


def to_tensors(model: Abacus, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Hugging Face's tensors: experts apart, everything in `dtype` but the router's bias."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        stacked = STACKED.fullmatch(name)
        wide = name.endswith(FP32_NAMES)
        stored = tensor.detach().cpu().to(torch.float32 if wide else dtype)
        if stacked is None:
            tensors[name] = stored.contiguous()
            continue
        prefix, projection = stacked.groups()
        for index, expert in enumerate(stored):
            tensors[f"{prefix}.{index}.{projection}.weight"] = expert.clone()
    return tensors


def from_tensors(tensors: dict[str, Tensor], model: Abacus) -> None:
    """Load bf16 or NVFP4 tensors into the training model; every name must be used."""
    state: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        split = SPLIT.fullmatch(name)
        if split is None:
            if not name.endswith(("weight_scale", "weight_scale_2")):
                state[name] = tensor.float()
            continue
        prefix, index, projection = split.groups()
        if tensor.dtype == torch.uint8:
            tensor = dequantise(tensor, tensors[f"{name}_scale"], tensors[f"{name}_scale_2"])
        experts.setdefault(f"{prefix}.{projection}", {})[int(index)] = tensor.float()
    for name, parts in experts.items():
        state[name] = torch.stack([parts[index] for index in range(len(parts))])
    model.load_state_dict(state, strict=True)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, from one file or several."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    if not tensors:
        raise FileNotFoundError(f"no .safetensors file in {folder}")
    return tensors


def shard_name(index: int, num_shards: int) -> str:
    """Hugging Face's file names."""
    if num_shards == 1:
        return "model.safetensors"
    return f"model-{index + 1:05}-of-{num_shards:05}.safetensors"


def save_bf16(tensors: dict[str, Tensor], folder: Path, out: Path, num_shards: int) -> None:
    """A whole checkpoint, its configuration and tokenizer copied from `folder`."""
    out.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors)
    places: dict[str, str] = {}
    for index in range(num_shards):
        chosen = names[index::num_shards]
        file_name = shard_name(index, num_shards)
        places.update(dict.fromkeys(chosen, file_name))
        save_file({name: tensors[name] for name in chosen}, out / file_name, {"format": "pt"})
    if num_shards > 1:
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        index_file = {"metadata": {"total_size": num_bytes}, "weight_map": places}
        (out / "model.safetensors.index.json").write_text(json.dumps(index_file, indent=1) + "\n")
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    copy_text_files(folder, out)


def copy_text_files(folder: Path, out: Path) -> None:
    """What belongs to a checkpoint beside its weights and configuration."""
    for name in TEXT_FILES:
        shutil.copy(folder / name, out / name)


def quantise_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Routed experts as NVFP4; all other tensors as they were."""
    packed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        split = SPLIT.fullmatch(name)
        if split is None:
            packed[name] = tensor
            continue
        prefix, index, projection = split.groups()
        pair = ("down_proj",) if projection == "down_proj" else ("gate_proj", "up_proj")
        scale_2 = global_scale(*(tensors[f"{prefix}.{index}.{other}.weight"] for other in pair))
        packed[name], packed[f"{name}_scale"] = quantise(tensor, scale_2)
        packed[f"{name}_scale_2"] = scale_2
    return packed


def unquantised_modules(config: dict[str, Any]) -> list[str]:
    """ModelOpt's list of what stays in bf16, as patterns."""
    num_layers = config["num_hidden_layers"] + config["num_nextn_predict_layers"]
    num_dense = config["first_k_dense_replace"]
    modules = ["lm_head", "model.embed_tokens", *(f"model.layers.{i}.*" for i in range(num_dense))]
    for index in range(num_dense, num_layers):
        parts = ("self_attn", "mlp.gate", "mlp.shared_experts")
        modules += [f"model.layers.{index}.{part}*" for part in parts]
    return [*modules, f"model.layers.{num_layers - 1}.eh_proj"]


def write_quantised(source: Path, out: Path) -> None:
    """Pack `source` into `out`, with the metadata ModelOpt writes."""
    out.mkdir(parents=True, exist_ok=True)
    packed = quantise_experts(read_tensors(source))
    save_file(packed, out / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    ignore = unquantised_modules(config)
    weights = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
    config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "W4A16_NVFP4",
        "producer": PRODUCER,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ignore,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    quantization = {"quant_algo": "W4A16_NVFP4", "kv_cache_quant_algo": None, "group_size": 16}
    record = {"producer": PRODUCER, "quantization": {**quantization, "exclude_modules": ignore}}
    (out / "hf_quant_config.json").write_text(json.dumps(record, indent=2) + "\n")
    copy_text_files(source, out)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    write_quantised(arguments.source, arguments.out)


if __name__ == "__main__":
    main()
