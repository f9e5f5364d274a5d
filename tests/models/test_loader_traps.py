"""Checkpoints as they are released: which linears are quantised, and how, differs in each.

Every recipe is written twice, packed and as the numbers the bits mean; the logits must agree. The
traps themselves are listed, and tested one by one, in tests/formats/test_traps.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.factories import TINY_GLM, tiny_glm_tensors
from tests.formats.folders import (
    as_compressed,
    as_fp8_block,
    as_fp8_block_compressed,
    as_fp8_row,
    as_fp8_tensor,
    as_modelopt,
)
from tests.models.driver import Driver
from tetrad.formats.checkpoint import Checkpoint
from tetrad.kernels.select import resolve_ops
from tetrad.models.base import Model
from tetrad.models.loader import load_model

Store = Callable[[str, Tensor], dict[str, Tensor]]
Recipe = dict[str, Store]
"""Glob pattern over module names → how to store what it matches. The first match holds."""


def as_bf16(module: str, weight: Tensor) -> dict[str, Tensor]:
    return {f"{module}.weight": weight.bfloat16()}


def as_modelopt_weight_only(module: str, weight: Tensor) -> dict[str, Tensor]:
    return as_modelopt(module, weight, input_scale=False)


ATTENTION = ("*.self_attn.[qkvo]*_proj*", "*.indexer.wq_b", "*.indexer.wk")
RECIPES: dict[str, Recipe] = {
    "routed experts only, the rest bf16": {
        "*.mlp.experts.*": as_modelopt,
        "*_proj*": as_bf16,
    },
    "routed and shared experts": {"*.mlp.*experts.*": as_modelopt_weight_only},
    "everything but the router": {"*.mlp.gate": as_bf16, "*": as_modelopt},
    "three schemes in one file": {
        "*.mlp.experts.*": as_modelopt,
        "*.mlp.shared_experts.*": as_fp8_block,
        **dict.fromkeys(ATTENTION, as_fp8_block),
        "model.layers.0.mlp.*": as_fp8_tensor,
    },
    "compressed-tensors, fp8 in blocks beside nvfp4": {
        "*.mlp.experts.*": as_compressed,
        **dict.fromkeys(ATTENTION, as_fp8_block_compressed),
    },
    "down_proj in fp8 inside nvfp4 experts": {
        "*.mlp.experts.*.down_proj": as_fp8_row,
        "*.mlp.experts.*": as_compressed,
    },
    "some layers left in bf16": {
        "model.layers.1.mlp.experts.*": as_bf16,
        "*.mlp.experts.*": as_modelopt,
    },
    "some experts of a layer left in bf16": {
        "model.layers.2.mlp.experts.[35].*": as_bf16,
        "*.mlp.experts.*": as_modelopt,
    },
    "static input scales on some experts only": {
        "*.mlp.experts.[0-3].gate_proj": as_modelopt,
        "*.mlp.experts.*": as_modelopt_weight_only,
    },
    "indexer keys and kv_b in fp8, indexer weights in bf16": {
        "*.indexer.wk": as_fp8_block,
        "*.indexer.weights_proj": as_bf16,
        "*.kv_b_proj": as_fp8_tensor,
    },
    "latent projections and head in nvfp4": {
        "*.q_a_proj": as_modelopt,
        "*.kv_a_proj_with_mqa": as_modelopt,
        "*.kv_b_proj": as_modelopt,
        "lm_head": as_modelopt,
    },
}


def stored(recipe: Recipe) -> dict[str, Tensor]:
    """The tiny model with every linear as the recipe says."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in tiny_glm_tensors(TINY_GLM).items():
        module = name.removesuffix(".weight")
        matches = [store for pattern, store in recipe.items() if fnmatchcase(module, pattern)]
        if matches and tensor.dim() == 2 and module != "model.embed_tokens":
            tensors |= matches[0](module, tensor)
        else:
            tensors[name] = tensor
    return tensors


def decoded(folder: Path) -> dict[str, Tensor]:
    """The values that the checkpoint in `folder` holds, in float32 under the usual names."""
    checkpoint = Checkpoint.open(folder)
    values: dict[str, Tensor] = {}
    for name, tensor in tiny_glm_tensors(TINY_GLM).items():
        module, shape = name.removesuffix(".weight"), tuple(tensor.shape)
        if tensor.dim() < 2 or module == "model.embed_tokens":
            values[name] = checkpoint.tensor(name, shape)
        elif ".mlp.experts." not in name:
            out, width = shape
            values[name] = checkpoint.linear(module, (out, width)).dequantize(torch.float32)
    for layer in (1, 2, 3):
        for leaf, shape in (
            ("gate_proj", (32, 64)),
            ("up_proj", (32, 64)),
            ("down_proj", (64, 32)),
        ):
            prefix = f"model.layers.{layer}.mlp.experts"
            modules = [f"{prefix}.{expert}.{leaf}" for expert in range(8)]
            stack = checkpoint.linears(modules, shape).dequantize(torch.float32)
            values |= {f"{module}.weight": stack[e].clone() for e, module in enumerate(modules)}
    return values


def write(folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY_GLM | config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def load(folder: Path) -> Model:
    return load_model(folder, device="cpu", dtype=torch.float32, ops=resolve_ops("cpu"))


def logits(folder: Path) -> Tensor:
    """Of 40 tokens, more than the indexer's top-k, so that a wrong indexer shows."""
    ids = torch.randint(128, (40,), generator=torch.Generator().manual_seed(2))
    return Driver(load(folder), [ids]).run([[(0, 40)]])[0]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_released_mixture_of_formats_computes_what_its_bits_mean(recipe: Recipe, tmp_path: Path):
    packed = write(tmp_path / "packed", stored(recipe))
    values, plain = decoded(packed), tiny_glm_tensors(TINY_GLM)
    assert any(not torch.equal(values[n], plain[n]) for n in values), "the recipe matches nothing"
    twin = write(tmp_path / "twin", values)
    torch.testing.assert_close(logits(packed), logits(twin), rtol=0, atol=2e-5)


def test_a_person_hears_what_contradicts_the_metadata(tmp_path: Path):
    tensors = stored({"*.mlp.experts.*": as_modelopt})
    metadata = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*.mlp.experts.*"]}
    (note,) = load(write(tmp_path / "odd", tensors, quantization_config=metadata)).checkpoint_notes
    assert "72 linear(s)" in note
    assert "declared bf16, stored nvfp4" in note
    assert load(write(tmp_path / "plain", tensors)).checkpoint_notes == ()


@pytest.mark.parametrize("store", [as_bf16, as_modelopt, as_compressed, as_fp8_block])
def test_a_prediction_layer_of_any_format_is_left_out(store: Store, tmp_path: Path):
    """Layer 4 of a model of four layers belongs to multi-token prediction."""
    plain = tiny_glm_tensors(TINY_GLM)
    wrong = torch.full((32, 64), 3.0)
    more = store("model.layers.4.mlp.experts.0.gate_proj", wrong) | store(
        "model.layers.4.eh", wrong
    )
    without = write(tmp_path / "without", plain)
    beside = write(tmp_path / "beside", plain | more, num_nextn_predict_layers=1)
    assert torch.equal(logits(beside), logits(without))


@pytest.mark.parametrize("override", [{"head_dim": 0}, {"head_dim": 192}, {"num_experts": 8}])
def test_redundant_keys_of_the_config_change_nothing(override: dict[str, Any], tmp_path: Path):
    plain = tiny_glm_tensors(TINY_GLM)
    expected = logits(write(tmp_path / "plain", plain))
    assert torch.equal(logits(write(tmp_path / "more", plain, **override)), expected)


def test_rope_theta_reaches_the_rotation(tmp_path: Path):
    plain = tiny_glm_tensors(TINY_GLM)
    near, far = (
        logits(write(tmp_path / str(theta), plain, rope_parameters={"rope_theta": theta}))
        for theta in (1e4, 8e6)
    )
    assert torch.allclose(near[0], far[0], atol=1e-4), "the first token is not rotated"
    assert not torch.allclose(near[-1], far[-1], atol=1e-2)
