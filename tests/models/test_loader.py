"""A checkpoint fits the model exactly or is refused in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.factories import TINY_GLM, tiny_glm_folder, tiny_glm_tensors
from tests.models.driver import Driver
from tetrad.core.arch import ModelArch
from tetrad.core.errors import CheckpointError
from tetrad.formats import fp8, nvfp4
from tetrad.kernels.select import resolve_ops
from tetrad.layers.moe import Moe
from tetrad.models.base import Model
from tetrad.models.loader import load_model

OPS = resolve_ops("cpu")
Tensors = dict[str, Tensor]
EXPERT = "model.layers.2.mlp.experts.3.up_proj"


def write(folder: Path, tensors: Tensors, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY_GLM | config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Model:
    return load_model(folder, device="cpu", dtype=dtype, ops=OPS)


def logits(folder: Path) -> Tensor:
    ids = torch.randint(128, (40,), generator=torch.Generator().manual_seed(2))
    return Driver(load(folder), [ids]).run([[(0, 40)]])[0]


def without(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def renamed(old: str, new: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__setitem__(new, tensors.pop(old))


def replaced(name: str, *shape: int) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__setitem__(name, torch.zeros(*shape))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (without("model.norm.weight"), ["model.norm.weight"]),
        (without(f"{EXPERT}.weight"), [EXPERT]),
        (without("model.layers.3.self_attn.indexer.k_norm.bias"), ["k_norm.bias"]),
        (without("model.layers.1.mlp.gate.e_score_correction_bias"), ["e_score_correction_bias"]),
        (renamed("lm_head.weight", "lm_haed.weight"), ["lm_head", "lm_haed.weight"]),
        (replaced(f"{EXPERT}.weight", 32, 48), [EXPERT, "32, 64", "32, 48"]),
        (replaced("model.layers.0.input_layernorm.weight", 63), ["input_layernorm", "64", "63"]),
        (replaced("model.layers.0.mlp.gate.weight", 8, 64), ["layers.0.mlp.gate.weight"]),
        (replaced("model.layers.1.self_attn.sink", 4), ["self_attn.sink"]),
        (replaced("model.layers.1.self_attn.q_a_proj.bias", 48), ["q_a_proj.bias"]),
    ],
)
def test_what_does_not_fit_is_named(
    damage: Callable[[Tensors], None], told: list[str], tmp_path: Path
):
    tensors = tiny_glm_tensors(TINY_GLM)
    damage(tensors)
    with pytest.raises(CheckpointError) as error:
        load(write(tmp_path, tensors))
    for part in told:
        assert part in str(error.value)


def test_a_leftover_names_the_nearest_known_tensor(tmp_path: Path):
    tensors = tiny_glm_tensors(TINY_GLM) | {
        "model.layers.1.self_attn.q_a_proj.wieght": torch.ones(1)
    }
    with pytest.raises(CheckpointError, match=r"q_a_proj\.wieght.*Did you mean.*q_a_proj\.weight"):
        load(write(tmp_path, tensors))


IGNORABLE = {
    "multi-token prediction": "model.layers.4.eh_proj.weight",
    "an expert of its layer": "model.layers.4.mlp.experts.0.gate_proj.weight",
    "the indexer of a shared layer": "model.layers.2.self_attn.indexer.wk.weight",
    "rotary frequencies": "model.layers.0.self_attn.rotary_emb.inv_freq",
    "key scale": "model.layers.0.self_attn.k_proj.k_scale",
    "value scale": "model.layers.0.self_attn.v_proj.v_scale",
}


@pytest.mark.parametrize("name", IGNORABLE.values(), ids=IGNORABLE)
def test_what_the_main_model_rightly_leaves_out(name: str, tmp_path: Path):
    plain = logits(tiny_glm_folder(tmp_path / "plain"))
    more = tiny_glm_tensors(TINY_GLM) | {name: torch.full((3,), torch.nan)}
    folder = write(tmp_path / "more", more, num_nextn_predict_layers=1)
    torch.testing.assert_close(logits(folder), plain, rtol=0, atol=0)


def test_the_prediction_layer_may_be_absent(tmp_path: Path):
    load(tiny_glm_folder(tmp_path, num_nextn_predict_layers=1))


def test_progress_ends_at_the_total(tmp_path: Path):
    seen: list[tuple[int, int]] = []
    folder = tiny_glm_folder(tmp_path)
    load_model(
        folder,
        device="cpu",
        dtype=torch.float32,
        ops=OPS,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == sorted(seen)
    total = sum(tensor.nbytes for tensor in tiny_glm_tensors(TINY_GLM).values())
    assert {t for _, t in seen} == {total}
    assert seen[-1] == (total, total)
    assert len(seen) > 50


def quantised(tensors: Tensors, *, down_fp8: bool, decoded: bool) -> Tensors:
    """The experts in NVFP4 as ModelOpt names it, or as the numbers those bits mean.

    Each matrix has its own global scale, so gate and up of one expert differ.
    """
    out = {}
    for name, tensor in tensors.items():
        if ".mlp.experts." not in name:
            out[name] = tensor
            continue
        module = name.removesuffix(".weight")
        if down_fp8 and "down_proj" in name:
            coarse = fp8.quantize_tensor(tensor)
            parts = {"weight": coarse.data, "weight_scale": coarse.scale}
            values = coarse.dequantize(torch.float32)
        else:
            fine = nvfp4.quantize(tensor)
            parts = {
                "weight": fine.codes,
                "weight_scale": fine.scales,
                "weight_scale_2": fine.global_scale,
                "input_scale": torch.tensor(0.01),
            }
            values = fine.dequantize(torch.float32)
        parts = {"weight": values} if decoded else parts
        out |= {f"{module}.{part}": value for part, value in parts.items()}
    return out


@pytest.mark.parametrize("down_fp8", [False, True], ids=["nvfp4", "nvfp4 with fp8 down"])
def test_quantised_experts_compute_what_their_bits_mean(down_fp8: bool, tmp_path: Path):
    tensors = tiny_glm_tensors(TINY_GLM)
    packed, decoded = (
        write(tmp_path / str(d), quantised(tensors, down_fp8=down_fp8, decoded=d))
        for d in (False, True)
    )
    ours = logits(packed)
    torch.testing.assert_close(ours, logits(decoded), rtol=0, atol=1e-5)
    original = logits(tiny_glm_folder(tmp_path / "original"))
    assert float((ours - original).abs().max()) > 1e-2


def test_the_weight_report_counts_every_byte_by_format(tmp_path: Path):
    tensors = quantised(tiny_glm_tensors(TINY_GLM), down_fp8=True, decoded=False)
    model = load(write(tmp_path, tensors))
    report = model.weight_report
    num_experts = 3 * 8
    assert report["nvfp4"]["num_tensors"] == 2 * num_experts
    assert report["nvfp4"]["stored_bytes"] == 2 * num_experts * (32 * 64 * 4.5 / 8 + 4)
    assert report["fp8_tensor"]["num_tensors"] == num_experts
    assert report["fp8_tensor"]["stored_bytes"] == num_experts * (32 * 64 + 4)
    # On a CPU they are decoded to fp32 once, which the report does not hide.
    in_memory = sum(report[name]["memory_bytes"] for name in ("nvfp4", "fp8_tensor"))
    assert in_memory == 3 * num_experts * 32 * 64 * 4
    assert model.weight_bytes == sum(row["memory_bytes"] for row in report.values())


def test_bf16_weights_halve_the_memory(tmp_path: Path):
    folder = tiny_glm_folder(tmp_path)
    full, half = load(folder), load(folder, torch.bfloat16)
    assert 0.5 * full.weight_bytes < half.weight_bytes < 0.56 * full.weight_bytes
    layer = half.layers[3]
    assert isinstance(layer.mlp, Moe)
    assert layer.attention.indexer is not None
    head_weights, key_bias = layer.attention.indexer.weights, layer.attention.norms[3]
    assert head_weights is not None
    assert key_bias is not None
    kept = [
        layer.mlp.front.weight.dequantize(torch.float32),
        layer.mlp.front.routing[0],
        head_weights.dequantize(torch.float32),
        key_bias,
    ]
    stored = tiny_glm_tensors(TINY_GLM)
    names = ["mlp.gate.weight", "mlp.gate.e_score_correction_bias"]
    names += [f"self_attn.indexer.{name}" for name in ("weights_proj.weight", "k_norm.bias")]
    for name, values in zip(names, kept, strict=True):
        assert torch.equal(values, stored[f"model.layers.3.{name}"]), f"{name} was rounded"


def test_dense_layers_follow_mlp_layer_types(tmp_path: Path):
    """transformers writes both keys; the list is the one that holds."""
    kinds = ["dense", "sparse", "sparse", "sparse"]
    same = tiny_glm_folder(tmp_path / "list", mlp_layer_types=kinds)
    config = json.loads((same / "config.json").read_text()) | {"first_k_dense_replace": 3}
    (same / "config.json").write_text(json.dumps(config))
    arch = load(same).arch
    assert isinstance(arch, ModelArch)
    assert arch.moe.first_dense_layers == 1
    with pytest.raises(CheckpointError, match="mlp_layer_types must list 'dense' for the first"):
        load(tiny_glm_folder(tmp_path / "mixed", mlp_layer_types=[*kinds[1:], "dense"]))
    with pytest.raises(CheckpointError, match="mlp_layer_types"):
        load(tiny_glm_folder(tmp_path / "short", mlp_layer_types=["dense"]))


def test_another_activation_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match="'gelu' is not supported; 'silu' is"):
        load(tiny_glm_folder(tmp_path, hidden_act="gelu"))
