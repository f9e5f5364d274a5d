"""Against NVIDIA's Model Optimizer: its exports are read, and its bits are reproduced.

data/modelopt_tiny/ was written by data/make_modelopt_fixture.py: a random GLM-5 in bf16, and three
exports of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.formats.folders import bits
from tetrad.core.arch import ModelArch
from tetrad.formats import quantizer
from tetrad.formats.checkpoint import Checkpoint
from tetrad.formats.patterns import Patterns

DATA = Path(__file__).parent / "data" / "modelopt_tiny"
SOURCE = load_file(DATA / "bf16" / "model.safetensors")
EVERYTHING: dict[str, Any] = {"include": ["*"], "exclude": ["lm_head"]}
"""What Model Optimizer's default configuration quantises."""


def quantized_modules(export: str) -> list[str]:
    tensors = load_file(DATA / export / "model.safetensors")
    modules = [n.removesuffix(".weight") for n, t in tensors.items() if t.dtype == torch.uint8]
    assert modules
    return modules


@pytest.mark.parametrize(("export", "num_quantized"), [("nvfp4_all", 34), ("nvfp4_experts", 12)])
def test_every_tensor_of_an_export_is_read(export: str, num_quantized: int):
    checkpoint = Checkpoint.open(DATA / export)
    formats = []
    for name, original in SOURCE.items():
        if original.dim() == 2:
            out, width = original.shape
            weight = checkpoint.linear(name.removesuffix(".weight"), (out, width))
            formats.append(weight.format_name)
            error = (weight.dequantize(torch.float32) - original.float()).norm()
            limit = 0.15 if weight.format_name == "nvfp4" else 0.0
            assert error <= limit * original.float().norm(), name
        else:
            assert torch.equal(checkpoint.tensor(name, tuple(original.shape)), original), name
    assert formats.count("nvfp4") == num_quantized
    assert formats.count("bf16") == len(formats) - num_quantized
    assert checkpoint.unread(lambda _: False) == []
    assert checkpoint.notes == []


def test_values_are_the_ones_model_optimizer_computes():
    """Its two scales are multiplied first, ours last, so the last bit of float32 may differ."""
    checkpoint = Checkpoint.open(DATA / "nvfp4_all")
    expected = load_file(DATA / "expected.safetensors")
    assert len(expected) == 14
    for module, values in expected.items():
        out, width = values.shape
        ours = checkpoint.linear(module, (out, width)).dequantize(torch.float32)
        assert torch.allclose(ours, values, rtol=2.0**-22, atol=0.0), module
        assert torch.equal(ours == 0, values == 0), module


@pytest.mark.parametrize(
    ("export", "choice"),
    [("nvfp4_all", EVERYTHING), ("nvfp4_experts", {"include": ["*.mlp.experts.*"]})],
)
def test_quantising_gives_the_same_bits(tmp_path: Path, export: str, choice: dict[str, Any]):
    """Codes, block scales and global scales of every linear, and every other tensor."""
    quantizer.run(DATA / "bf16", tmp_path, **choice)
    ours = load_file(tmp_path / "model.safetensors")
    theirs = load_file(DATA / export / "model.safetensors")
    static = {name for name in theirs if name.endswith(".input_scale")}
    assert static, "the export calibrates activations, which a weight-only one does not"
    assert set(ours) == set(theirs) - static
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert tensor.shape == theirs[name].shape, name
        assert torch.equal(bits(tensor), bits(theirs[name])), name


def test_siblings_share_the_global_scale_that_model_optimizer_gives_them():
    """The fixture would not notice a missing rule if all its siblings had one scale anyway."""
    theirs = load_file(DATA / "nvfp4_all" / "model.safetensors")
    prefix = "model.layers.1.self_attn."
    names = ("q_a_proj", "kv_a_proj_with_mqa", "indexer.wk", "indexer.weights_proj")
    assert len({theirs[f"{prefix}{n}.weight_scale_2"].item() for n in names}) == 1
    assert len({SOURCE[f"{prefix}{n}.weight"].abs().max().item() for n in names}) == 4


def metadata(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    inside = json.loads((folder / "config.json").read_text())["quantization_config"]
    return inside, json.loads((folder / "hf_quant_config.json").read_text())["quantization"]


def test_metadata_is_written_as_model_optimizer_writes_it(tmp_path: Path):
    quantizer.run(DATA / "bf16", tmp_path, **EVERYTHING)
    inside, beside = metadata(tmp_path)
    their_inside, their_beside = metadata(DATA / "w4a16_all")
    assert inside.pop("producer")["name"] == "tetrad"
    assert their_inside.pop("producer")["name"] == "modelopt"
    assert inside == their_inside
    assert beside == their_beside


def test_the_ignore_list_is_the_one_model_optimizer_writes(tmp_path: Path):
    quantizer.run(DATA / "bf16", tmp_path)
    inside, beside = metadata(tmp_path)
    their_inside, their_beside = metadata(DATA / "nvfp4_experts")
    assert inside["ignore"] == their_inside["ignore"]
    assert beside["exclude_modules"] == their_beside["exclude_modules"]
    quantized = quantized_modules("nvfp4_experts")
    assert not any(Patterns(inside["ignore"]).match(module) for module in quantized)


@pytest.mark.parametrize("export", ["bf16", "nvfp4_all", "nvfp4_experts", "w4a16_all"])
def test_config_is_understood(export: str):
    arch = ModelArch.from_folder(DATA / export)
    assert (arch.num_layers, arch.moe.num_experts, arch.rope.theta) == (2, 4, 10000.0)
