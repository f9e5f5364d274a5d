"""What a checkpoint says about its own quantisation, used only to cross-check and to explain.

The tensors decide how a weight is read (`naming`). Metadata that contradicts them becomes a note
for the person who serves the model, never another way to read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

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


class _Weights(BaseModel):
    num_bits: int | None = None
    group_size: int | None = None


class _Group(BaseModel):
    weights: _Weights | None = None


class _Layer(BaseModel):
    quant_algo: str | None = None


class _Declared(BaseModel):
    """The keys that are compared; all others are left alone."""

    quant_method: str | None = None
    quant_algo: str | None = None
    group_size: int | None = None
    weight_block_size: list[int] | None = None
    config_groups: dict[str, _Group] | None = None
    quantized_layers: dict[str, _Layer] | None = None
    ignore: list[str] | None = None
    exclude_modules: list[str] | None = None

    @property
    def nvfp4_group_size(self) -> int | None:
        """The group size of the four-bit weights; None when it is not said."""
        groups = [group.weights for group in (self.config_groups or {}).values()]
        sizes = [w.group_size for w in groups if w and w.num_bits == 4 and w.group_size]
        return sizes[0] if sizes else self.group_size


class QuantMetadata:
    """The parsed `quantization_config` and hf_quant_config.json, and what was seen against it."""

    def __init__(self, declared: _Declared) -> None:
        self._is_modelopt = declared.quant_method == "modelopt"
        self._method = declared.quant_method
        self._group_size = declared.nvfp4_group_size
        self._algo = _ALGOS.get(declared.quant_algo or "")
        self._layers = declared.quantized_layers or {}
        self._excluded = Patterns(declared.exclude_modules or declared.ignore or [])
        self._contradictions: list[str] = []

    @classmethod
    def read(cls, folder: Path, config: dict[str, Any]) -> QuantMetadata:
        """Parse what `folder` and its `config` say. A model without metadata is fine.

        Raises CheckpointError when it is malformed, or declares FP8 blocks other than 128 x 128.
        """
        inside = config.get("quantization_config") or {}
        source, beside = "config.json's quantization_config", folder / HF_QUANT_CONFIG
        try:
            declared = _Declared.model_validate(inside)
            if beside.is_file():
                source = HF_QUANT_CONFIG
                details = read_json_object(beside).get("quantization") or {}
                declared = _Declared.model_validate({"quant_method": "modelopt"} | inside | details)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise CheckpointError(f"{source} is malformed: {place}: {first['msg']}.") from None
        _check_fp8_blocks(declared.weight_block_size)
        return cls(declared)

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
        """Remember that `module` is stored as `found`, to compare with what is declared.

        Unquantised is never a contradiction: routers are left out of the lists of some releases.
        """
        declared = self._declared(module)
        if found != "bf16" and declared is not None and declared != found:
            self._contradictions.append(f"'{module}' is declared {declared}, stored {found}")

    def notes(self) -> list[str]:
        """What contradicts the tensors, a sentence each."""
        notes = []
        if self._algo == "nvfp4" and self._group_size not in (None, NVFP4_BLOCK):
            notes.append(
                f"The metadata gives group_size {self._group_size}, but NVFP4 is stored with one "
                f"scale per {NVFP4_BLOCK} values; the tensors were followed."
            )
        if self._contradictions:
            notes.append(
                f"{len(self._contradictions)} linear(s) are stored in another format than the "
                f"metadata declares ({self._contradictions[0]}); the tensors were followed."
            )
        return notes

    def _declared(self, module: str) -> StoredFormat | None:
        """None when the metadata says nothing that could be compared."""
        if module in self._layers:
            return _ALGOS.get(self._layers[module].quant_algo or "")
        if self._layers or self._excluded.match(module):
            return "bf16"
        return self._algo if self._is_modelopt else None


def _check_fp8_blocks(size: list[int] | None) -> None:
    """Other block sizes can give scales of the same shape, so here the metadata must be heeded."""
    if size not in (None, [FP8_BLOCK, FP8_BLOCK]):
        raise CheckpointError(
            f"config.json: weight_block_size {size} is not supported; "
            f"[{FP8_BLOCK}, {FP8_BLOCK}] is."
        )
