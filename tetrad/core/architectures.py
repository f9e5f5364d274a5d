"""Which architecture a model has, by its config.json or its GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

from tetrad.core.arch import MODEL_TYPES, ModelArch
from tetrad.core.errors import CheckpointError, nearest
from tetrad.core.gguf import GgufFile, is_gguf
from tetrad.core.gguf_arch import arch_of_gguf
from tetrad.core.jsonfile import read_json_object
from tetrad.core.llama_arch import LlamaArch

Arch: TypeAlias = ModelArch | LlamaArch


def arch_of(model: Path) -> Arch:
    """The shapes of a model folder, or of a GGUF file. Raises CheckpointError with a sentence."""
    if is_gguf(model):
        return arch_of_gguf(GgufFile.read(model))
    path = model / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{model} holds no config.json, so it is not a model folder.")
    return arch_of_config(read_json_object(path))


def arch_of_config(config: dict[str, Any]) -> Arch:
    """The shapes in a parsed config.json of a supported `model_type`."""
    model_type = config.get("model_type")
    if model_type == "llama":
        return LlamaArch.from_config(config)
    if model_type not in MODEL_TYPES:
        raise CheckpointError(
            f"model_type {model_type!r} is not supported; Tetrad serves "
            f"{', '.join(MODEL_TYPES)}.{nearest(str(model_type), MODEL_TYPES)}"
        )
    return ModelArch.from_config(config)
