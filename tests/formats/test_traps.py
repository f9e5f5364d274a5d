"""Traps that checkpoints of this family set for loaders; each has made an engine serve garbage.

What a whole model makes of them is tested in tests/models/test_loader_traps.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.factories import TINY_GLM
from tests.formats.folders import (
    as_compressed,
    as_fp8_block,
    as_fp8_tensor,
    as_modelopt,
    matrix,
    write_folder,
)
from tetrad.core.arch import ModelArch
from tetrad.core.errors import CheckpointError
from tetrad.formats import nvfp4
from tetrad.formats.checkpoint import Checkpoint
from tetrad.formats.patterns import Patterns, summarize
from tetrad.formats.weights import DenseWeight, Nvfp4Weight

LAYER = "model.layers.3."
OUT, WIDTH = 32, 64


def dense(module: str, weight: Tensor) -> dict[str, Tensor]:
    return {f"{module}.weight": weight.bfloat16()}


def opened(tmp_path: Path, tensors: dict[str, Tensor], **config: Any) -> Checkpoint:
    return Checkpoint.open(write_folder(tmp_path, tensors, config=config))


def close(checkpoint: Checkpoint, module: str, exact: Tensor, tolerance: float = 0.12) -> bool:
    out, width = exact.shape
    values = checkpoint.linear(module, (out, width)).dequantize(torch.float32)
    return float((values - exact).norm() / exact.norm()) < tolerance


# 1. A BF16 shared expert was put into a slot meant for packed FP4.


def test_a_shared_expert_keeps_its_own_format(tmp_path: Path):
    routed, shared = f"{LAYER}mlp.experts.0.gate_proj", f"{LAYER}mlp.shared_experts.gate_proj"
    tensors = as_modelopt(routed, matrix(OUT, WIDTH)) | dense(shared, matrix(OUT, WIDTH, 1))
    checkpoint = opened(tmp_path, tensors, quantization_config={"quant_method": "modelopt"})
    assert checkpoint.linear(routed, (OUT, WIDTH)).format_name == "nvfp4"
    weight = checkpoint.linear(shared, (OUT, WIDTH))
    assert isinstance(weight, DenseWeight)
    assert torch.equal(weight.data, matrix(OUT, WIDTH, 1).bfloat16())


# 2. One half of gate_up was scaled with the other half's global scale.


def test_gate_and_up_may_have_different_global_scales(tmp_path: Path):
    gate, up = matrix(OUT, WIDTH), matrix(OUT, WIDTH, 1) * 10
    tensors: dict[str, Tensor] = {}
    for expert in range(2):
        tensors |= as_modelopt(f"e.{expert}.gate_proj", gate * (1 + expert))
        tensors |= as_modelopt(f"e.{expert}.up_proj", up * (1 + expert))
    checkpoint = opened(tmp_path, tensors)
    for leaf, exact in (("gate_proj", gate), ("up_proj", up)):
        stacked = checkpoint.linears([f"e.{e}.{leaf}" for e in range(2)], (OUT, WIDTH))
        assert isinstance(stacked, Nvfp4Weight)
        assert stacked.global_scale.shape == (2,)
        values = stacked.dequantize(torch.float32)
        for expert in range(2):
            error = values[expert] - exact * (1 + expert)
            assert error.norm() / exact.norm() < 0.12 * (1 + expert)


def test_scales_must_be_numbers(tmp_path: Path):
    tensors = as_modelopt("e.0.up_proj", matrix(OUT, WIDTH))
    tensors["e.0.up_proj.weight_scale"].view(torch.uint8)[0, 0] = 0x7F
    checkpoint = opened(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"'e\.0\.up_proj' has scales values that are NaN"):
        checkpoint.linear("e.0.up_proj", (OUT, WIDTH))


# 3. q_a and kv_a were joined under one global scale.


def test_latent_projections_have_their_own_global_scales(tmp_path: Path):
    q_a, kv_a = matrix(OUT, WIDTH), matrix(48, WIDTH, 1) * 30
    tensors = as_modelopt("a.q_a_proj", q_a) | as_modelopt("a.kv_a_proj_with_mqa", kv_a)
    checkpoint = opened(tmp_path, tensors)
    assert close(checkpoint, "a.q_a_proj", q_a)
    assert close(checkpoint, "a.kv_a_proj_with_mqa", kv_a)


# 4. Static activation scales are there, or not, or only for some experts.


@pytest.mark.parametrize("with_input_scale", [(), (0,), (0, 1, 2)])
def test_input_scales_change_nothing(tmp_path: Path, with_input_scale: tuple[int, ...]):
    tensors: dict[str, Tensor] = {}
    for e in range(3):
        weight = matrix(OUT, WIDTH, e)
        tensors |= as_modelopt(f"e.{e}", weight, input_scale=e in with_input_scale)
    checkpoint = opened(tmp_path, tensors)
    stacked = checkpoint.linears(["e.0", "e.1", "e.2"], (OUT, WIDTH))
    assert checkpoint.unread(lambda _: False) == []
    for e in range(3):
        expected = nvfp4.quantize(matrix(OUT, WIDTH, e)).dequantize(torch.float32)
        assert torch.equal(stacked.dequantize(torch.float32)[e], expected)


# 5. The layer after the last (multi-token prediction) is absent, or in a format of its own.


@pytest.mark.parametrize("store", [None, dense, as_modelopt, as_compressed, as_fp8_block])
def test_a_layer_that_is_left_out_needs_no_format(tmp_path: Path, store: Any):
    wanted, left_out = "model.layers.0.o_proj", "model.layers.1.eh_proj"
    tensors = dense(wanted, matrix(OUT, WIDTH))
    if store is not None:
        tensors |= store(left_out, matrix(OUT, WIDTH))
    checkpoint = opened(tmp_path, tensors, num_nextn_predict_layers=1)
    assert close(checkpoint, wanted, matrix(OUT, WIDTH))
    assert checkpoint.unread(lambda name: name.startswith("model.layers.1.")) == []
    assert checkpoint.nbytes_read == OUT * WIDTH * 2


# 6. The exclude list was matched loosely, or believed.


def test_patterns_are_anchored():
    patterns = Patterns(["model.layers.1.*", "model.layers.0*", "lm_head"])
    assert patterns.match("model.layers.1.mlp.gate_proj")
    assert patterns.match("model.layers.0.mlp.gate_proj")
    assert patterns.match("lm_head")
    for other in ("model.layers.10.mlp", "model.layers.11.mlp", "lm_head.0", "x.lm_head"):
        assert not patterns.match(other)
    assert not Patterns([]).match("anything")


def test_a_regular_expression_is_anchored_at_its_start():
    patterns = Patterns([r"re:.*mlp\.gate$", "re:model.layers.1[.]"])
    assert patterns.match("model.layers.3.mlp.gate")
    assert not patterns.match("model.layers.3.mlp.gate_proj")
    assert patterns.match("model.layers.1.self_attn.o_proj")
    assert not patterns.match("model.layers.10.self_attn.o_proj")
    with pytest.raises(CheckpointError, match="is invalid"):
        Patterns(["re:("])


def test_a_summary_covers_what_was_kept_and_nothing_else():
    quantized = [f"model.layers.{i}.mlp.experts.0.up_proj" for i in (3, 10, 19)]
    kept = ["lm_head", "model.embed_tokens", "model.layers.0.mlp.up_proj"]
    kept += [f"model.layers.{i}.self_attn.{p}" for i in (1, 3, 10) for p in ("q_a", "o_proj")]
    patterns = summarize(kept, quantized)
    assert patterns == [
        "lm_head",
        "model.embed_tokens",
        "model.layers.0*",
        "model.layers.1.*",
        "model.layers.10.self_attn*",
        "model.layers.3.self_attn*",
    ]
    assert all(Patterns(patterns).match(name) for name in kept)
    assert not any(Patterns(patterns).match(name) for name in quantized)


def test_the_tensors_decide_whatever_the_exclude_list_says(tmp_path: Path):
    names = [f"model.layers.{i}.mlp.experts.0.up_proj" for i in (1, 10)]
    tensors = as_modelopt(names[0], matrix(OUT, WIDTH)) | dense(names[1], matrix(OUT, WIDTH))
    metadata = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["model.layers.1.*"]}
    checkpoint = opened(tmp_path, tensors, quantization_config=metadata)
    assert checkpoint.linear(names[0], (OUT, WIDTH)).format_name == "nvfp4"
    assert checkpoint.linear(names[1], (OUT, WIDTH)).format_name == "bf16"
    (note,) = checkpoint.notes
    assert "1 linear(s) are stored in another format than the metadata declares" in note
    assert f"'{names[0]}' is declared bf16, stored nvfp4" in note


# 7. The indexer's key projection and kv_b are quantised, their neighbours are not.


@pytest.mark.parametrize("store", [as_modelopt, as_compressed, as_fp8_tensor, as_fp8_block])
def test_wk_and_kv_b_are_decoded_from_any_format(tmp_path: Path, store: Any):
    wk, proj, kv_b = matrix(16, WIDTH), matrix(4, WIDTH, 1), matrix(256, 32, 2)
    tensors = store("indexer.wk", wk) | dense("indexer.weights_proj", proj)
    checkpoint = opened(tmp_path, tensors | store("kv_b_proj", kv_b))
    assert close(checkpoint, "indexer.wk", wk)
    assert close(checkpoint, "kv_b_proj", kv_b)
    assert checkpoint.linear("indexer.weights_proj", (4, WIDTH)).format_name == "bf16"


# 8. rope_theta was looked for in the wrong place and fell back to 10000.


def test_rope_theta_is_read_from_rope_parameters_and_never_guessed():
    inner = TINY_GLM | {"rope_parameters": {"rope_type": "default", "rope_theta": 8e6}}
    assert ModelArch.from_config(inner).rope.theta == 8e6
    outer = TINY_GLM | {"rope_parameters": None, "rope_scaling": None, "rope_theta": 1e6}
    assert ModelArch.from_config(outer).rope.theta == 1e6
    nowhere = TINY_GLM | {"rope_parameters": {"rope_type": "default"}}
    with pytest.raises(CheckpointError, match=r"lacks rope_parameters\.rope_theta"):
        ModelArch.from_config(nowhere)


# 9. head_dim, redundant expert counts and the number of layers were misread.


@pytest.mark.parametrize("head_dim", [0, 64, 192])
def test_head_dim_is_not_used(head_dim: int):
    assert ModelArch.from_config(TINY_GLM | {"head_dim": head_dim}) == ModelArch.from_config(
        TINY_GLM
    )


def test_expert_and_layer_counts():
    both = ModelArch.from_config(TINY_GLM | {"num_experts": 8, "num_nextn_predict_layers": 1})
    assert (both.moe.num_experts, both.num_layers, both.num_mtp_layers) == (8, 4, 1)
    other = {k: v for k, v in TINY_GLM.items() if k != "n_routed_experts"} | {"num_experts": 6}
    assert ModelArch.from_config(other).moe.num_experts == 6


# 10. The router's bias was rounded to bf16, where its values are all the same.


def test_the_bias_of_the_router_stays_in_float32(tmp_path: Path):
    name = f"{LAYER}mlp.gate.e_score_correction_bias"
    bias = 8.0 + torch.arange(8) * 1e-3
    assert bias.bfloat16().unique().numel() == 1
    stored = opened(tmp_path, {name: bias}).tensor(name, (8,))
    assert stored.dtype == torch.float32
    assert torch.equal(stored, bias)


# 11. A repository's name says GLM-5.3, its config.json says otherwise.


def test_the_architecture_is_what_config_says():
    with pytest.raises(CheckpointError, match="model_type 'glm5_next' is not supported"):
        ModelArch.from_config(TINY_GLM | {"model_type": "glm5_next"})


# More: formats mixed inside one expert, and static scales of a quantised cache.


@pytest.mark.parametrize("down", [as_fp8_tensor, as_fp8_block, dense])
def test_formats_may_differ_inside_one_expert(tmp_path: Path, down: Any):
    tensors: dict[str, Tensor] = {}
    for e in range(2):
        tensors |= as_compressed(f"e.{e}.gate_proj", matrix(OUT, WIDTH, e))
        tensors |= as_compressed(f"e.{e}.up_proj", matrix(OUT, WIDTH, e + 2))
        tensors |= down(f"e.{e}.down_proj", matrix(WIDTH, OUT, e + 4))
    checkpoint = opened(tmp_path, tensors)
    for leaf, shape, seed in (
        ("gate_proj", (OUT, WIDTH), 0),
        ("up_proj", (OUT, WIDTH), 2),
        ("down_proj", (WIDTH, OUT), 4),
    ):
        stacked = checkpoint.linears([f"e.{e}.{leaf}" for e in range(2)], shape)
        for e in range(2):
            exact = matrix(*shape, seed + e)
            error = stacked.dequantize(torch.float32)[e] - exact
            assert error.norm() / exact.norm() < 0.12
    assert checkpoint.unread(lambda _: False) == []
    assert checkpoint.notes == []


@pytest.mark.parametrize("name", ["k_proj.k_scale", "v_proj.v_scale", "attn.k_scale"])
def test_static_scales_of_the_cache_are_ignored(tmp_path: Path, name: str):
    tensors = dense("o_proj", matrix(OUT, WIDTH)) | {f"self_attn.{name}": torch.ones(1)}
    checkpoint = opened(tmp_path, tensors)
    checkpoint.linear("o_proj", (OUT, WIDTH))
    assert checkpoint.unread(lambda _: False) == []
