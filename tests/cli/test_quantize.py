"""`tetrad quantize` as a command: its table, its flags, its refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Run
from tests.formats.folders import matrix, write_folder
from tests.house.source import ROOT
from tetrad.data import embedded_model
from tetrad.formats.checkpoint import Checkpoint


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tensors = {
        f"model.layers.1.mlp.experts.{expert}.{leaf}.weight": matrix(32, 64, expert).bfloat16()
        for expert in range(2)
        for leaf in ("gate_proj", "up_proj")
    }
    return write_folder(tmp_path / "in", tensors | {"lm_head.weight": matrix(32, 64, 9)})


def format_of(folder: Path, module: str) -> str:
    return Checkpoint.open(folder).linear(module, (32, 64)).format_name


def test_the_table_shows_errors_and_sizes(tetrad: Run, source: Path, tmp_path: Path):
    code, out, err = tetrad("quantize", str(source), str(tmp_path / "out"))
    assert code == 0
    report = json.loads((tmp_path / "out" / "quantize_report.json").read_text())
    rows = {(row["kind"], row["quantized"]): row for row in report["kinds"]}
    lines = [line.split() for line in out.splitlines() if "experts" in line]
    assert len(lines) == 2
    for line, leaf in zip(lines, ("gate_proj", "up_proj"), strict=True):
        row = rows[f"mlp.experts.*.{leaf}", True]
        assert row["kind"] in line
        assert {f"{row['rms_error_mean']:.4f}", f"{row['rms_error_max']:.4f}"} <= set(line)
    assert "as is" in next(line for line in out.splitlines() if "lm_head" in line)
    assert "it needs a tokenizer.json, which SOURCE does not have" in out
    (source / "tokenizer.json").write_text("{}", encoding="utf-8")
    code, out, err = tetrad("quantize", str(source), str(tmp_path / "out"), "--force")
    assert code == 0
    assert f"tetrad serve {tmp_path / 'out'}" in " ".join(out.split())
    assert "Quantising: " in err
    assert "MB/s" in err


def test_patterns_choose_and_force_replaces(tetrad: Run, source: Path, tmp_path: Path):
    target = tmp_path / "out"
    arguments = ("quantize", str(source), str(target))
    patterns = ("--include", "*.mlp.experts.*", "lm_head", "--exclude", "*.experts.1.*")
    assert tetrad(*arguments, *patterns)[0] == 0
    assert format_of(target, "lm_head") == "nvfp4"
    assert format_of(target, "model.layers.1.mlp.experts.0.up_proj") == "nvfp4"
    assert format_of(target, "model.layers.1.mlp.experts.1.up_proj") == "bf16"
    code, _, err = tetrad(*arguments)
    assert code == 2
    assert err == f"error: {target} is not empty; --force replaces the checkpoint in it.\n"
    assert tetrad(*arguments, "--force")[0] == 0
    assert format_of(target, "lm_head") == "bf16"


def test_small_files_make_shards(tetrad: Run, source: Path, tmp_path: Path):
    target = tmp_path / "out"
    code, _, _ = tetrad("quantize", str(source), str(target), "--max-shard-gb", "0.000004")
    assert code == 0
    assert len(list(target.glob("*.safetensors"))) > 1


@pytest.mark.parametrize(
    ("given", "missing"), [((), "SOURCE"), (("x",), "TARGET"), (("x", "--force"), "TARGET")]
)
def test_both_folders_must_be_named(tetrad: Run, given: tuple[str, ...], missing: str):
    code, _, err = tetrad("quantize", *given)
    assert code == 2
    assert err == f"error: {missing} is missing: tetrad quantize [OPTIONS] SOURCE TARGET.\n"


def test_a_folder_that_is_not_there(tetrad: Run, tmp_path: Path):
    code, _, err = tetrad("quantize", str(tmp_path / "no"), str(tmp_path / "out"))
    assert code == 2
    assert err == f"error: There is no model folder at {tmp_path / 'no'}.\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there(tetrad: Run, source: Path, tmp_path: Path):
    arguments = ("quantize", str(source), str(tmp_path / "out"), "--device", "cuda")
    code, _, err = tetrad(*arguments)
    assert code == 2
    assert "use --device cpu" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.gpu
def test_a_gpu_writes_the_same_bytes(tetrad: Run, source: Path, tmp_path: Path):
    for device in ("cpu", "cuda"):
        arguments = ("quantize", str(source), str(tmp_path / device), "--device", device)
        assert tetrad(*arguments)[0] == 0
    files = [tmp_path / device / "model.safetensors" for device in ("cpu", "cuda")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_example_of_the_readme_runs(tetrad: Run, tmp_path: Path):
    """Unpacks the embedded model and packs it again: the same numbers but for bf16's rounding."""
    readme = (ROOT / "README.md").read_text()
    begin = readme.index("python examples/abacus/unpack.py")
    lines = readme[begin : readme.index("```", begin)].splitlines()
    unpack, quantize, chat = [line.replace("out/", f"{tmp_path}/").split() for line in lines]
    subprocess.run([sys.executable, *unpack[1:]], cwd=ROOT, check=True)
    assert tetrad(*quantize[1:])[0] == 0
    assert chat[:4] == ["tetrad", "chat", "--model", quantize[-1]]
    before, after = Checkpoint.open(embedded_model()), Checkpoint.open(tmp_path / "nvfp4")
    assert before.names == after.names
    for layer in (1, 6):
        module, shape = f"model.layers.{layer}.mlp.experts.3.up_proj", (64, 256)
        was, now = (one.linear(module, shape) for one in (before, after))
        assert now.format_name == "nvfp4"
        difference = was.dequantize(torch.float32) - now.dequantize(torch.float32)
        assert difference.norm() < 0.01 * was.dequantize(torch.float32).norm()
