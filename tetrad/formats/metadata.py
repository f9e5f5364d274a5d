"""What a checkpoint says about its own quantisation, used only to cross-check and to explain.

The tensors decide how a weight is read (`naming`). Metadata that contradicts them becomes a note
for the person who serves the model, never another way to read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tetrad.core.errors import CheckpointError
from tetrad.core.jsonfile import read_json_object
from tetrad.formats.naming import StoredFormat
from tetrad.formats.patterns import Patterns
from tetrad.formats.weights import FP8_BLOCK, NVFP4_BLOCK

HF_QUANT_CONFIG = "hf_quant_config.json"
KNOWN_METHODS = ("modelopt", "compressed-tensors", "fp8")
_ALGOS: dict[str, StoredFormat] = {
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
    "FP8": "fp8_tensor",
    "FP8_PB_WO": "fp8_block",
}


class QuantMetadata:
    """The parsed `quantization_config` and hf_quant_config.json, and what was seen against it."""

    def __init__(self, method: str | None, quantization: dict[str, Any]) -> None:
        self._method = method
        self._group_size = _group_size(quantization)
        self._algo = _ALGOS.get(str(quantization.get("quant_algo")))
        self._layers = quantization.get("quantized_layers") or {}
        exclude = quantization.get("exclude_modules") or quantization.get("ignore") or []
        self._excluded = Patterns(exclude)
        self._contradictions: list[str] = []

    @classmethod
    def read(cls, folder: Path, config: dict[str, Any]) -> QuantMetadata:
        """Parse what `folder` and its `config` say. A model without metadata is fine."""
        inside = config.get("quantization_config") or {}
        method = inside.get("quant_method")
        _check_fp8_blocks(inside)
        beside = folder / HF_QUANT_CONFIG
        if beside.is_file():
            quantization = read_json_object(beside).get("quantization") or {}
            return cls(method or "modelopt", {**inside, **quantization})
        return cls(method, inside)

    @property
    def hint(self) -> str:
        """Added to errors about missing tensors when the method is one Tetrad does not know."""
        if self._method is None or self._method in KNOWN_METHODS:
            return ""
        return (
            f" config.json says quant_method '{self._method}'; Tetrad reads "
            f"{', '.join(KNOWN_METHODS)} and unquantised checkpoints."
        )

    def observe(self, module: str, found: StoredFormat) -> None:
        """Remember that `module` is stored as `found`, to compare with what is declared."""
        declared = self._declared(module)
        if declared is not None and declared != found:
            self._contradictions.append(f"'{module}' is declared {declared}, stored {found}")

    def notes(self) -> list[str]:
        """What contradicts the tensors, a sentence each."""
        notes = []
        if self._group_size not in (None, NVFP4_BLOCK) and self._algo == "nvfp4":
            notes.append(
                f"The metadata gives group_size {self._group_size}, but NVFP4 is stored with one "
                f"scale per {NVFP4_BLOCK} values; the tensors were followed."
            )
        if self._contradictions:
            notes.append(
                f"{len(self._contradictions)} linears are stored in another format than the "
                f"metadata declares ({self._contradictions[0]}); the tensors were followed."
            )
        return notes

    def _declared(self, module: str) -> StoredFormat | None:
        """None when the metadata says nothing that could be compared."""
        if self._method != "modelopt":
            return "bf16" if self._excluded.match(module) else None
        if module in self._layers:
            return _ALGOS.get(str(self._layers[module].get("quant_algo")))
        if self._layers or self._excluded.match(module):
            return "bf16"
        return self._algo


def _group_size(quantization: dict[str, Any]) -> int | None:
    size = quantization.get("group_size")
    groups: Sequence[Any] = list((quantization.get("config_groups") or {}).values())
    for group in groups:
        weights = group.get("weights") or {}
        if weights.get("num_bits") == 4:
            size = weights.get("group_size", size)
    return size


def _check_fp8_blocks(quantization: dict[str, Any]) -> None:
    """Other block sizes can give scales of the same shape, so here the metadata must be heeded."""
    size = quantization.get("weight_block_size")
    if size is not None and list(size) != [FP8_BLOCK, FP8_BLOCK]:
        raise CheckpointError(
            f"config.json: weight_block_size {size} is not supported; "
            f"[{FP8_BLOCK}, {FP8_BLOCK}] is."
        )
