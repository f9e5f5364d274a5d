"""Writing small checkpoint folders for the tests of this room."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tetrad.formats import fp8, nvfp4
from tetrad.formats.catalogue import INDEX_NAME


def write_folder(
    folder: Path,
    *shards: dict[str, Tensor],
    config: dict[str, Any] | None = None,
    index: bool | None = None,
) -> Path:
    """One file per shard, with an index when there are several (or as `index` says)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {}))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}.safetensors"
        save_file({name: tensor.clone() for name, tensor in shard.items()}, folder / file)
        weight_map.update(dict.fromkeys(shard, file))
    if index or (index is None and len(shards) > 1):
        write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def matrix(out: int, width: int, seed: int = 0) -> Tensor:
    """Normal float32 [out, width]."""
    return torch.randn(out, width, generator=torch.Generator().manual_seed(seed))


def bits(tensor: Tensor) -> Tensor:
    """The stored bytes, for comparisons that know no NaN and no negative zero."""
    return tensor.reshape(-1).view(torch.uint8)


def as_modelopt(module: str, weight: Tensor, *, input_scale: bool = True) -> dict[str, Tensor]:
    """The tensors of one NVFP4 linear under ModelOpt's names."""
    quantized = nvfp4.quantize(weight)
    tensors = {
        f"{module}.weight": quantized.codes,
        f"{module}.weight_scale": quantized.scales,
        f"{module}.weight_scale_2": quantized.global_scale,
    }
    return {**tensors, f"{module}.input_scale": torch.tensor(0.01)} if input_scale else tensors


def as_compressed(module: str, weight: Tensor) -> dict[str, Tensor]:
    """The tensors of one NVFP4 linear under compressed-tensors' names; globals are divisors."""
    quantized = nvfp4.quantize(weight)
    return {
        f"{module}.weight_packed": quantized.codes,
        f"{module}.weight_scale": quantized.scales,
        f"{module}.weight_global_scale": (1.0 / quantized.global_scale).reshape(1),
        f"{module}.input_global_scale": torch.tensor([100.0]),
    }


def as_fp8_tensor(module: str, weight: Tensor) -> dict[str, Tensor]:
    """FP8 per tensor as ModelOpt writes it."""
    quantized = fp8.quantize_tensor(weight)
    return {
        f"{module}.weight": quantized.data,
        f"{module}.weight_scale": quantized.scale,
        f"{module}.input_scale": torch.tensor(0.01),
    }


def as_fp8_block(module: str, weight: Tensor) -> dict[str, Tensor]:
    """FP8 in 128 x 128 blocks as DeepSeek and GLM release it."""
    quantized = fp8.quantize_block(weight)
    return {f"{module}.weight": quantized.data, f"{module}.weight_scale_inv": quantized.scale_inv}


def as_fp8_row(module: str, weight: Tensor) -> dict[str, Tensor]:
    """FP8 with a scale per row as compressed-tensors writes it."""
    scale = weight.abs().amax(dim=1, keepdim=True) / 448
    return {
        f"{module}.weight": (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn),
        f"{module}.weight_scale": scale.bfloat16(),
    }


def as_fp8_block_compressed(module: str, weight: Tensor) -> dict[str, Tensor]:
    """FP8 in blocks under compressed-tensors' name of the scale."""
    stored = as_fp8_block(module, weight)
    return {
        f"{module}.weight": stored[f"{module}.weight"],
        f"{module}.weight_scale": stored[f"{module}.weight_scale_inv"],
    }


def as_fp8_block_modelopt(module: str, weight: Tensor) -> dict[str, Tensor]:
    """FP8_PB_WO keeps a 1 between the axes of the scale."""
    stored = as_fp8_block_compressed(module, weight)
    scale = stored[f"{module}.weight_scale"]
    return {**stored, f"{module}.weight_scale": scale[:, None, :, None]}
