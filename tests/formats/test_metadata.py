"""What checkpoints say about themselves: heeded for explanations, never for reading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tetrad.core.errors import CheckpointError
from tetrad.formats.metadata import HF_QUANT_CONFIG, QuantMetadata
from tetrad.formats.naming import StoredFormat

MIXED = {
    "model.layers.0.mlp.down_proj": {"quant_algo": "FP8"},
    "model.layers.3.mlp.experts.0.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
    "model.layers.4.self_attn.o_proj": {"quant_algo": "FP8_PB_WO"},
    "model.layers.5.self_attn.o_proj": {"quant_algo": "W4A8_AWQ"},
}
FOUND: tuple[StoredFormat, ...] = ("fp8_tensor", "nvfp4", "fp8_block", "bf16")


def read(folder: Path, inside: Any = None, beside: Any = None) -> QuantMetadata:
    if beside is not None:
        (folder / HF_QUANT_CONFIG).write_text(json.dumps({"quantization": beside}))
    return QuantMetadata.read(folder, {} if inside is None else {"quantization_config": inside})


def test_no_metadata_contradicts_nothing(tmp_path: Path):
    metadata = read(tmp_path)
    metadata.observe("lm_head", "nvfp4")
    assert metadata.notes() == []
    assert metadata.hint == ""


@pytest.mark.parametrize("place", ["inside", "beside"])
def test_mixed_precision_is_compared_layer_by_layer(tmp_path: Path, place: str):
    details = {"quant_algo": "MIXED_PRECISION", "quantized_layers": MIXED}
    if place == "inside":
        metadata = read(tmp_path, details | {"quant_method": "modelopt"})
    else:
        metadata = read(tmp_path, beside=details)
    for module, found in zip(MIXED, FOUND, strict=True):
        metadata.observe(module, found)
    metadata.observe("lm_head", "bf16")
    assert metadata.notes() == []
    metadata.observe("model.layers.0.mlp.down_proj", "nvfp4")
    assert "'model.layers.0.mlp.down_proj' is declared fp8_tensor, stored nvfp4" in str(
        metadata.notes()
    )


def test_hf_quant_config_is_read_without_anything_in_config(tmp_path: Path):
    metadata = read(tmp_path, beside={"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]})
    metadata.observe("lm_head", "bf16")
    metadata.observe("o_proj", "nvfp4")
    assert metadata.notes() == []
    metadata.observe("o_proj", "fp8_block")
    assert "'o_proj' is declared nvfp4, stored fp8_block" in metadata.notes()[0]


def test_a_router_that_the_exclude_list_forgets_is_no_contradiction(tmp_path: Path):
    metadata = read(tmp_path, {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []})
    metadata.observe("model.layers.3.mlp.gate", "bf16")
    assert metadata.notes() == []


@pytest.mark.parametrize(
    "details",
    [
        {"quant_algo": "NVFP4", "group_size": 32},
        {
            "quant_algo": "NVFP4",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}},
        },
    ],
)
def test_another_group_size_is_noted(tmp_path: Path, details: dict[str, Any]):
    (note,) = read(tmp_path, details | {"quant_method": "modelopt"}).notes()
    assert "group_size 32" in note
    assert "one scale per 16 values" in note
    right = json.loads(json.dumps(details).replace("32", "16"))
    assert read(tmp_path, right | {"quant_method": "modelopt"}).notes() == []


def test_other_fp8_blocks_are_refused(tmp_path: Path):
    """Scales of other blocks can have the very shape that 128 x 128 would have."""
    with pytest.raises(CheckpointError, match=r"weight_block_size \[64, 128\] is not supported"):
        read(tmp_path, {"quant_method": "fp8", "weight_block_size": [64, 128]})
    read(tmp_path, {"quant_method": "fp8", "weight_block_size": [128, 128]})


def test_an_unknown_method_is_named_where_a_tensor_is_missing(tmp_path: Path):
    assert "quant_method 'awq'" in read(tmp_path, {"quant_method": "awq"}).hint
    for method in ("modelopt", "compressed-tensors", "fp8"):
        assert read(tmp_path, {"quant_method": method}).hint == ""


@pytest.mark.parametrize(
    "inside",
    [
        "nvfp4",
        {"quant_method": "modelopt", "config_groups": ["x"]},
        {"quant_method": "modelopt", "config_groups": {"g": {"weights": 4}}},
        {"quant_method": "modelopt", "quantized_layers": {"lm_head": "NVFP4"}},
        {"quant_method": "modelopt", "ignore": "lm_head"},
        {"quant_method": "modelopt", "ignore": [3]},
        {"quant_method": "fp8", "weight_block_size": 128},
    ],
)
def test_malformed_metadata_is_refused_in_a_sentence(tmp_path: Path, inside: Any):
    with pytest.raises(CheckpointError, match=r"quantization_config is malformed"):
        read(tmp_path, inside)
    with pytest.raises(CheckpointError, match=r"hf_quant_config.json is malformed"):
        read(tmp_path, beside={"exclude_modules": 7})
