"""`tetrad quantize`'s library function: what it writes, what it reports, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.formats.folders import as_fp8_tensor, as_modelopt, bits, matrix, write_folder
from tetrad.core.errors import CheckpointError, ConfigError, UserError
from tetrad.formats import nvfp4
from tetrad.formats.catalogue import INDEX_NAME
from tetrad.formats.checkpoint import Checkpoint
from tetrad.formats.quantize_report import kind_of
from tetrad.formats.quantizer import run

EXPERT_LEAVES = ("gate_proj", "up_proj", "down_proj")


def source_tensors() -> dict[str, Tensor]:
    """Layers 1, 2 and 10 (so that sorting by text goes wrong), 10 standing for an MTP layer."""
    tensors = {"model.embed_tokens.weight": matrix(8, 32), "lm_head.weight": matrix(8, 32, 1)}
    for layer in (1, 2, 10):
        prefix = f"model.layers.{layer}"
        for expert in range(2):
            for seed, leaf in enumerate(EXPERT_LEAVES):
                weight = matrix(32, 32, layer + 20 * expert + 100 * seed) * (1 + seed)
                tensors[f"{prefix}.mlp.experts.{expert}.{leaf}.weight"] = weight.bfloat16()
        tensors[f"{prefix}.mlp.gate.weight"] = matrix(2, 32, layer)
        tensors[f"{prefix}.mlp.gate.e_score_correction_bias"] = matrix(1, 2, layer)[0]
        tensors[f"{prefix}.mlp.shared_experts.up_proj.weight"] = matrix(32, 32, layer).half()
        tensors[f"{prefix}.input_layernorm.weight"] = matrix(1, 32, layer)[0]
    return tensors


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = write_folder(tmp_path / "in", source_tensors(), config={"model_type": "glm_moe_dsa"})
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("hello")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "model.gguf").write_bytes(b"gguf")
    return folder


def stored(folder: Path) -> dict[str, Tensor]:
    return {k: t for f in sorted(folder.glob("*.safetensors")) for k, t in load_file(f).items()}


def test_routed_experts_of_every_layer_are_quantised_and_nothing_else(source: Path, tmp_path: Path):
    run(source, tmp_path / "out")
    before, after = stored(source), stored(tmp_path / "out")
    experts = [name for name in before if ".mlp.experts." in name]
    assert len(experts) == 18
    scales = {f"{name}_{kind}" for name in experts for kind in ("scale", "scale_2")}
    assert set(after) == set(before) | scales
    for name, tensor in before.items():
        if name in experts:
            assert after[name].dtype == torch.uint8, name
            assert after[f"{name}_scale"].dtype == torch.float8_e4m3fn
            assert after[f"{name}_scale_2"].shape == ()
        else:
            assert after[name].dtype == tensor.dtype, name
            assert torch.equal(after[name], tensor), name


def test_the_result_loads_and_is_near_the_original(source: Path, tmp_path: Path):
    run(source, tmp_path / "out")
    checkpoint = Checkpoint.open(tmp_path / "out")
    modules = [f"model.layers.10.mlp.experts.{e}.down_proj" for e in range(2)]
    weight = checkpoint.linears(modules, (32, 32))
    assert weight.format_name == "nvfp4"
    for expert, module in enumerate(modules):
        exact = source_tensors()[f"{module}.weight"].float()
        error = weight.dequantize(torch.float32)[expert] - exact
        assert error.norm() / exact.norm() < 0.12


def test_gate_and_up_of_one_expert_share_their_global_scale(source: Path, tmp_path: Path):
    run(source, tmp_path / "out")
    tensors = stored(tmp_path / "out")
    prefix = "model.layers.2.mlp.experts.1."
    gate, up, down = (tensors[f"{prefix}{leaf}.weight_scale_2"] for leaf in EXPERT_LEAVES)
    pair = [source_tensors()[f"{prefix}{leaf}.weight"] for leaf in EXPERT_LEAVES[:2]]
    assert gate == up == nvfp4.global_scale_of(pair)
    assert down == nvfp4.global_scale_of([source_tensors()[f"{prefix}down_proj.weight"]])


def test_a_zero_twin_does_not_set_the_scale(tmp_path: Path):
    up = matrix(32, 32) * 1e-3
    tensors = {"a.gate_proj.weight": torch.zeros(32, 32), "a.up_proj.weight": up}
    run(write_folder(tmp_path / "in", tensors), tmp_path / "out", ["a.*"])
    values = Checkpoint.open(tmp_path / "out").linear("a.up_proj", (32, 32))
    assert (values.dequantize(torch.float32) - up).norm() / up.norm() < 0.12


def test_an_excluded_twin_does_not_set_the_scale(source: Path, tmp_path: Path):
    run(source, tmp_path / "out", ["*.gate_proj"])
    name = "model.layers.2.mlp.experts.1.gate_proj.weight"
    expected = nvfp4.global_scale_of([source_tensors()[name]])
    assert stored(tmp_path / "out")[f"{name}_scale_2"] == expected


def test_companions_are_copied_and_other_weights_are_not(source: Path, tmp_path: Path):
    run(source, tmp_path / "out")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "hf_quant_config.json",
        "model.safetensors",
        "quantize_report.json",
        "tokenizer.json",
    ]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "glm_moe_dsa"
    assert config["quantization_config"]["quant_method"] == "modelopt"


def test_shards_hold_whole_layers_in_order(source: Path, tmp_path: Path):
    run(source, tmp_path / "whole")
    run(source, tmp_path / "out", max_shard_bytes=9000)
    weight_map = json.loads((tmp_path / "out" / INDEX_NAME).read_text())["weight_map"]
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    count = len(files)
    assert count > 2
    assert [f.name for f in files] == [
        f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)
    ]
    assert all(file.stat().st_size < 9000 + 20_000 for file in files)
    layers = [int(name.split(".")[2]) for name in weight_map if ".layers." in name]
    assert layers == sorted(layers)
    whole, parts = stored(tmp_path / "whole"), stored(tmp_path / "out")
    assert set(whole) == set(parts) == set(weight_map)
    for name in whole:
        assert torch.equal(bits(whole[name]), bits(parts[name])), name
    total = json.loads((tmp_path / "out" / INDEX_NAME).read_text())["metadata"]["total_size"]
    assert total == sum(tensor.nbytes for tensor in whole.values())
    assert Checkpoint.open(tmp_path / "out").nbytes_total == total


def test_include_and_exclude_are_anchored(source: Path, tmp_path: Path):
    run(source, tmp_path / "out", ["model.layers.1.*", "lm_head"], ["*.down_proj"])
    codes = {n for n, t in stored(tmp_path / "out").items() if t.dtype == torch.uint8}
    experts = [f"mlp.experts.{e}.{leaf}" for e in range(2) for leaf in EXPERT_LEAVES[:2]]
    expected = [*experts, "mlp.shared_experts.up_proj"]
    assert codes == {"lm_head.weight"} | {f"model.layers.1.{name}.weight" for name in expected}


def test_routers_and_embeddings_are_never_quantised(source: Path, tmp_path: Path):
    run(source, tmp_path / "out", ["*"])
    after = stored(tmp_path / "out")
    kept = {n for n in source_tensors() if n.endswith("weight") and after[n].dtype != torch.uint8}
    assert kept == {"model.embed_tokens.weight"} | {
        f"model.layers.{layer}.{rest}.weight"
        for layer in (1, 2, 10)
        for rest in ("mlp.gate", "input_layernorm")
    }


def test_the_report_measures_what_was_written(source: Path, tmp_path: Path):
    report = run(source, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "quantize_report.json").read_text())
    assert written["bytes_before"] == report.bytes_before
    assert written["bytes_before"] == sum(t.nbytes for t in stored(source).values())
    assert written["bytes_after"] == sum(t.nbytes for t in stored(tmp_path / "out").values())
    kinds = {(row["kind"], row["quantized"]): row for row in written["kinds"]}
    row = kinds["mlp.experts.*.up_proj", True]
    errors = {}
    checkpoint = Checkpoint.open(tmp_path / "out")
    for name, tensor in source_tensors().items():
        if name.endswith("up_proj.weight") and ".experts." in name:
            module, exact = name.removesuffix(".weight"), tensor.float()
            values = checkpoint.linear(module, (32, 32)).dequantize(torch.float32)
            errors[module] = float((values - exact).norm() / exact.norm())
    assert row["count"] == 6
    assert row["bytes_before"] == 6 * 2048
    assert row["bytes_after"] == 6 * (512 + 64 + 4)
    assert row["rms_error_mean"] == pytest.approx(sum(errors.values()) / 6, rel=1e-5)
    assert row["rms_error_max"] == pytest.approx(max(errors.values()), rel=1e-5)
    assert row["worst"] == max(errors, key=lambda module: errors[module])
    assert "rms_error_mean" not in kinds["mlp.gate", False]


def test_kinds():
    assert kind_of("model.layers.7.mlp.experts.12.gate_proj.weight") == "mlp.experts.*.gate_proj"
    assert kind_of("model.embed_tokens.weight") == "embed_tokens"
    assert kind_of("lm_head.weight") == "lm_head"
    assert kind_of("model.layers.0.self_attn.indexer.k_norm.bias") == (
        "self_attn.indexer.k_norm.bias"
    )


def test_progress_reaches_the_end(source: Path, tmp_path: Path):
    seen: list[tuple[int, int]] = []
    run(source, tmp_path / "out", on_bytes=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == sum(t.nbytes for t in stored(source).values())


# What it refuses.


def refused(kind: type[UserError], source: Path, target: Path, *args: Any, **kwargs: Any) -> str:
    """The message of the error; the target must not have become a loadable folder."""
    with pytest.raises(kind) as caught:
        run(source, target, *args, **kwargs)
    assert "\n" not in str(caught.value)
    if target != source:
        assert not (target / "config.json").is_file()
    return str(caught.value)


def test_in_and_out_must_differ(source: Path, tmp_path: Path):
    (tmp_path / "link").symlink_to(source)
    for target in (source, tmp_path / "in" / ".." / "in", tmp_path / "link"):
        with pytest.raises(ConfigError, match="SOURCE and TARGET are both"):
            run(source, target, force=True)


def test_force_is_needed_to_overwrite_and_leaves_no_old_shard(source: Path, tmp_path: Path):
    target = tmp_path / "out"
    run(source, target, max_shard_bytes=9000)
    (target / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty; --force replaces the checkpoint"):
        run(source, target)
    run(source, target, force=True)
    assert [file.name for file in target.glob("*.safetensors")] == ["model.safetensors"]
    assert not (target / INDEX_NAME).exists()
    assert (target / "notes.txt").read_text() == "mine"
    assert Checkpoint.open(target).nbytes_total


def test_out_is_a_file(source: Path, tmp_path: Path):
    (tmp_path / "out").write_text("")
    assert "must be a folder" in refused(ConfigError, source, tmp_path / "out")


def test_a_quantised_source_is_refused(source: Path, tmp_path: Path):
    run(source, tmp_path / "once")
    message = refused(CheckpointError, tmp_path / "once", tmp_path / "twice")
    assert "already quantised (config.json says 'modelopt')" in message
    for number, store in enumerate((as_modelopt, as_fp8_tensor)):
        folder = write_folder(tmp_path / f"in{number}", store("mlp.experts.0", matrix(32, 32)))
        message = refused(CheckpointError, folder, tmp_path / "twice")
        assert message.startswith("'mlp.experts.0.weight' in ")
        assert "only bf16, fp16 and fp32 weights can be quantised" in message


def test_a_pattern_that_matches_nothing_names_the_nearest(source: Path, tmp_path: Path):
    message = refused(
        ConfigError, source, tmp_path / "out", ["model.layers.2.mlp.exprts.1.up_proj"]
    )
    assert "Did you mean 'model.layers.2.mlp.experts.1.up_proj'?" in message
    message = refused(ConfigError, source, tmp_path / "out", ["*"], ["*.mlp.gate"])
    assert "matches '*.mlp.gate'" in message
    message = refused(ConfigError, source, tmp_path / "out", ["lm_head"], ["lm_*"])
    assert "Nothing is left to quantise" in message


def test_a_width_that_blocks_do_not_divide(tmp_path: Path):
    folder = write_folder(tmp_path / "in", {"a.weight": matrix(4, 24), "b.weight": matrix(4, 32)})
    message = refused(CheckpointError, folder, tmp_path / "out", ["*"])
    assert "'a' is 24 wide, and NVFP4 needs a multiple of 16" in message
    run(folder, tmp_path / "out", ["*"], ["a"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_numbers_leave_no_loadable_folder(tmp_path: Path, bad: float):
    weight = matrix(4, 32)
    weight[1, 1] = bad
    folder = write_folder(tmp_path / "in", {"a.weight": weight})
    message = refused(CheckpointError, folder, tmp_path / "out", ["*"])
    assert "Tensor 'a.weight' holds NaN or infinite values" in message


def test_a_folder_that_cannot_be_written(source: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refused(UserError, source, tmp_path / "file" / "out")


def test_other_tensors_are_copied_whatever_their_type(tmp_path: Path):
    tensors = {
        "a.weight": matrix(4, 32),
        "count": torch.tensor(7),
        "mask": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
    }
    (tmp_path / "in").mkdir()
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "config.json").write_text("{}")
    run(tmp_path / "in", tmp_path / "out", ["a"])
    after = stored(tmp_path / "out")
    for name in ("count", "mask", "empty"):
        assert torch.equal(after[name], tensors[name])


def test_links_in_the_target_are_replaced_and_not_followed(source: Path, tmp_path: Path):
    """They may lead to the source, or to another model."""
    (source / "tokenizer.json").write_text("{}", encoding="utf-8")
    target, other = tmp_path / "out", tmp_path / "other.json"
    other.write_text("another model's", encoding="utf-8")
    target.mkdir()
    for name in ("config.json", "tokenizer.json", "quantize_report.json"):
        (target / name).symlink_to(other)
    (target / "model.safetensors").symlink_to(source / "model.safetensors")
    before = {file.name: file.read_bytes() for file in source.iterdir()}
    run(source, target, force=True)
    assert {file.name: file.read_bytes() for file in source.iterdir()} == before
    assert other.read_text(encoding="utf-8") == "another model's"
    assert not any(file.is_symlink() for file in target.iterdir())
