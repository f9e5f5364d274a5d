"""Asking a checkpoint for tensors and linears: every format, and every way to be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.formats.folders import (
    as_compressed,
    as_fp8_block,
    as_fp8_block_compressed,
    as_fp8_block_modelopt,
    as_fp8_row,
    as_fp8_tensor,
    as_modelopt,
    matrix,
    write_folder,
)
from tetrad.core.errors import CheckpointError
from tetrad.formats.checkpoint import Checkpoint
from tetrad.formats.weights import DenseWeight

W = matrix(160, 192)
MAPS = Path("/proc/self/maps")


def opened(tmp_path: Path, *shards: dict[str, Tensor], **config: object) -> Checkpoint:
    return Checkpoint.open(write_folder(tmp_path, *shards, config=config))


def relative_error(values: Tensor, exact: Tensor) -> float:
    return float((values - exact).norm() / exact.norm())


FORMATS = [
    pytest.param(lambda m, w: {f"{m}.weight": w}, "bf16", 0.0, id="f32"),
    pytest.param(lambda m, w: {f"{m}.weight": w.bfloat16()}, "bf16", 0.003, id="bf16"),
    pytest.param(lambda m, w: {f"{m}.weight": w.half()}, "bf16", 0.001, id="f16"),
    pytest.param(as_modelopt, "nvfp4", 0.12, id="modelopt"),
    pytest.param(as_compressed, "nvfp4", 0.12, id="compressed-tensors"),
    pytest.param(as_fp8_tensor, "fp8_tensor", 0.04, id="fp8_tensor"),
    pytest.param(as_fp8_block, "fp8_block", 0.04, id="fp8_block"),
    pytest.param(as_fp8_block_compressed, "fp8_block", 0.04, id="fp8_block-compressed"),
    pytest.param(as_fp8_block_modelopt, "fp8_block", 0.04, id="fp8_block-modelopt"),
    pytest.param(as_fp8_row, "bf16", 0.04, id="fp8_row"),
]


@pytest.mark.parametrize(("store", "name", "tolerance"), FORMATS)
def test_a_linear_is_read_in_the_format_it_is_stored_in(tmp_path, store, name, tolerance):
    checkpoint = opened(tmp_path, store("proj", W))
    weight = checkpoint.linear("proj", (160, 192))
    assert weight.format_name == name
    assert weight.shape == (160, 192)
    assert relative_error(weight.dequantize(torch.float32), W) <= tolerance
    assert checkpoint.unread(lambda _: False) == []


@pytest.mark.parametrize(("store", "name", "tolerance"), FORMATS)
def test_stacked_linears_equal_the_single_ones(tmp_path, store, name, tolerance):
    modules = [f"experts.{e}.up_proj" for e in range(3)]
    tensors: dict[str, Tensor] = {}
    for seed, module in enumerate(modules):
        tensors |= store(module, matrix(160, 192, seed) * (1 + seed))
    checkpoint = opened(tmp_path, tensors)
    stacked = checkpoint.linears(modules, (160, 192))
    assert stacked.format_name == name
    assert stacked.shape == (3, 160, 192)
    assert checkpoint.unread(lambda _: False) == []
    assert checkpoint.notes == []
    for index, module in enumerate(modules):
        alone = checkpoint.linear(module, (160, 192)).dequantize(torch.float32)
        assert torch.equal(stacked.dequantize(torch.float32)[index], alone)


def test_compressed_tensors_means_the_same_as_modelopt(tmp_path: Path):
    checkpoint = opened(tmp_path, as_modelopt("a", W) | as_compressed("b", W))
    a, b = (checkpoint.linear(name, (160, 192)).dequantize(torch.float32) for name in "ab")
    # The divisor was rounded to float32 once, and its inverse once more.
    assert torch.allclose(a, b, rtol=2.0**-22, atol=0.0)


def test_plain_tensors_keep_their_type(tmp_path: Path):
    stored = {"norm.weight": torch.randn(5).bfloat16(), "bias": torch.randn(3)}
    checkpoint = opened(tmp_path, stored)
    for name, tensor in stored.items():
        read = checkpoint.tensor(name, tuple(tensor.shape))
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor)


def test_weights_do_not_hang_on_the_file(tmp_path: Path):
    """Overwriting a mapped file would change weights in use, or kill the process."""
    checkpoint = opened(tmp_path, as_modelopt("proj", W) | {"norm": torch.ones(4)})
    norm, weight = checkpoint.tensor("norm", (4,)), checkpoint.linear("proj", (160, 192))
    before = weight.dequantize(torch.float32)
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as stream:
        stream.seek(-file.stat().st_size + 1000, 2)
        stream.write(b"\xff" * (file.stat().st_size - 1000))
    assert norm.tolist() == [1.0] * 4
    assert torch.equal(weight.dequantize(torch.float32), before)


@pytest.mark.skipif(not MAPS.exists(), reason="needs Linux's list of mapped files")
def test_no_file_is_mapped(tmp_path: Path):
    """Pages read through a mapping count as memory in use, and change with the file."""
    checkpoint = opened(tmp_path, *({f"t{i}": torch.full((4,), float(i))} for i in range(6)))
    read = [checkpoint.tensor(f"t{i}", (4,)) for i in (0, 1, 2, 3, 4, 5, 0, 5)]
    assert [int(tensor[0]) for tensor in read] == [0, 1, 2, 3, 4, 5, 0, 5]
    mapped = {line.split()[-1] for line in MAPS.read_text().splitlines() if str(tmp_path) in line}
    assert mapped == set()


def test_progress_counts_every_byte_once(tmp_path: Path):
    seen: list[tuple[int, int]] = []
    folder = write_folder(tmp_path, as_modelopt("a", W, input_scale=False), {"n": torch.ones(4)})
    checkpoint = Checkpoint.open(folder, on_bytes=lambda done, total: seen.append((done, total)))
    checkpoint.linear("a", (160, 192))
    checkpoint.linear("a", (160, 192))
    checkpoint.tensor("n", (4,))
    total = 160 * 96 + 160 * 12 + 4 + 16
    assert checkpoint.nbytes_total == total
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_unread_lists_what_nobody_asked_for(tmp_path: Path):
    tensors = {"a": torch.ones(1), "b": torch.ones(1), "layers.9.c": torch.ones(1)}
    checkpoint = opened(tmp_path, tensors, as_modelopt("proj", W))
    checkpoint.tensor("a", (1,))
    left = checkpoint.unread(lambda name: name.startswith("layers.9."))
    assert left == [
        "b",
        "proj.input_scale",
        "proj.weight",
        "proj.weight_scale",
        "proj.weight_scale_2",
    ]


def test_a_scale_beside_a_dense_weight_is_not_swallowed(tmp_path: Path):
    """Something was meant to be scaled, and is not: the loader must hear of it."""
    tensors = {"proj.weight": W.bfloat16(), "proj.weight_scale": torch.tensor(0.5)}
    checkpoint = opened(tmp_path, tensors)
    checkpoint.linear("proj", (160, 192))
    assert checkpoint.unread(lambda _: False) == ["proj.weight_scale"]


def refused(checkpoint: Checkpoint, module: str, shape: tuple[int, int] = (160, 192)) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.linear(module, shape)
    return str(caught.value)


def test_a_missing_tensor_names_the_nearest(tmp_path: Path):
    checkpoint = opened(tmp_path, {"model.layers.0.q_a_proj.weight": W, "model.norm.weight": W[0]})
    message = refused(checkpoint, "model.layers.0.q_proj")
    assert "lacks tensor 'model.layers.0.q_proj.weight' (expected [160, 192])" in message
    assert "Did you mean 'model.layers.0.q_a_proj.weight'?" in message
    with pytest.raises(CheckpointError, match=r"'model\.norm'.*mean 'model\.norm\.weight'\?"):
        checkpoint.tensor("model.norm", (192,))


def test_another_shape_names_both(tmp_path: Path):
    checkpoint = opened(tmp_path, {"a.weight": W.bfloat16(), "n": W[0]} | as_modelopt("b", W))
    message = refused(checkpoint, "a", (160, 96))
    assert "'a.weight'" in message
    assert "expected [160, 96], found BF16 [160, 192] in model.safetensors" in message
    message = refused(checkpoint, "b", (160, 384))
    assert "expected U8 [160, 192] (NVFP4 of [160, 384]), found U8 [160, 96]" in message
    with pytest.raises(CheckpointError, match=r"'n'.*expected \[5\], found F32 \[192\]"):
        checkpoint.tensor("n", (5,))


@pytest.mark.parametrize(
    ("store", "lost"),
    [
        (as_modelopt, "weight_scale"),
        (as_modelopt, "weight_scale_2"),
        (as_compressed, "weight_scale"),
        (as_compressed, "weight_global_scale"),
        (as_fp8_tensor, "weight_scale"),
        (as_fp8_block, "weight_scale_inv"),
    ],
)
def test_a_missing_scale_is_an_error(tmp_path: Path, store, lost: str):
    tensors = store("proj", W)
    del tensors[f"proj.{lost}"]
    message = refused(opened(tmp_path, tensors), "proj")
    assert f"lacks tensor 'proj.{lost.removesuffix('_inv')}'" in message


BAD_SCALES = [
    pytest.param(as_modelopt, "weight_scale", torch.ones(160, 6), id="group of 32"),
    pytest.param(as_modelopt, "weight_scale_2", torch.ones(160), id="global per row"),
    pytest.param(as_modelopt, "weight_scale", torch.ones(160, 12, dtype=torch.uint8), id="e8m0"),
    pytest.param(as_fp8_block, "weight_scale_inv", torch.ones(3, 2), id="block of 64"),
    pytest.param(as_fp8_tensor, "weight_scale", torch.ones(7), id="fp8 of odd shape"),
    pytest.param(as_fp8_tensor, "weight_scale", torch.ones(1, dtype=torch.uint8), id="fp8 u8"),
]


@pytest.mark.parametrize(("store", "suffix", "scale"), BAD_SCALES)
def test_a_scale_of_another_shape_or_type_is_an_error(tmp_path: Path, store, suffix, scale):
    tensors = store("proj", W) | {f"proj.{suffix}": scale}
    message = refused(opened(tmp_path, tensors), "proj")
    assert f"'proj.{suffix}'" in message
    assert "expected" in message
    assert f"found {'U8' if scale.dtype == torch.uint8 else 'F32'} {list(scale.shape)}" in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e5m2, torch.int32])
def test_an_unknown_type_names_what_can_be_read(tmp_path: Path, dtype: torch.dtype):
    message = refused(opened(tmp_path, {"proj.weight": W.to(dtype)}), "proj")
    assert "a format Tetrad does not read; it reads BF16, F16, F32, FP8" in message


def test_two_encodings_of_one_linear_are_an_error(tmp_path: Path):
    tensors = as_compressed("proj", W) | {"proj.weight": W}
    assert "stored twice" in refused(opened(tmp_path, tensors), "proj")


def test_a_quantised_tensor_is_never_taken_for_plain_numbers(tmp_path: Path):
    """FP8 has the shape of the weight itself: without its scale it would be silently wrong."""
    checkpoint = opened(tmp_path, as_fp8_tensor("embed", W))
    with pytest.raises(CheckpointError, match=r"must not be quantised.*found F8_E4M3"):
        checkpoint.tensor("embed.weight", (160, 192))


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_scales_that_are_not_numbers_are_refused_by_name(tmp_path: Path, byte: int):
    good, bad = as_modelopt("e.0", W), as_modelopt("e.1", W)
    bad["e.1.weight_scale"].view(torch.uint8)[7, 3] = byte
    checkpoint = opened(tmp_path, good | bad)
    assert "'e.1' has scales values that are NaN" in refused(checkpoint, "e.1")
    with pytest.raises(CheckpointError, match=r"Linear 'e\.1' has scales"):
        checkpoint.linears(["e.0", "e.1"], (160, 192))


def test_a_zero_divisor_is_refused(tmp_path: Path):
    tensors = as_compressed("proj", W) | {"proj.weight_global_scale": torch.zeros(1)}
    assert "global_scale values that are NaN or infinite" in refused(
        opened(tmp_path, tensors), "proj"
    )


def test_experts_that_differ_in_format_are_dequantised_and_noted(tmp_path: Path):
    weights = [matrix(160, 192, seed) for seed in range(3)]
    tensors = as_modelopt("e.0", weights[0]) | {"e.1.weight": weights[1].bfloat16()}
    checkpoint = opened(tmp_path, tensors | as_fp8_block("e.2", weights[2]))
    stacked = checkpoint.linears(["e.0", "e.1", "e.2"], (160, 192))
    assert isinstance(stacked, DenseWeight)
    assert stacked.data.dtype == torch.bfloat16
    for value, exact, tolerance in zip(stacked.data, weights, (0.12, 0.003, 0.04), strict=True):
        assert relative_error(value.float(), exact) < tolerance
    assert checkpoint.unread(lambda _: False) == []
    (note,) = checkpoint.notes
    assert "bf16 (BF16), fp8_block (F8_E4M3), nvfp4 (U8)" in note


def test_one_float32_expert_keeps_the_stack_in_float32(tmp_path: Path):
    tensors = {"e.0.weight": W.bfloat16(), "e.1.weight": W}
    stacked = opened(tmp_path, tensors).linears(["e.0", "e.1"], (160, 192))
    assert isinstance(stacked, DenseWeight)
    assert torch.equal(stacked.data, torch.stack([W.bfloat16().float(), W]))


@pytest.mark.gpu
def test_weights_land_on_the_gpu(tmp_path: Path):
    folder = write_folder(tmp_path, as_modelopt("e.0", W) | as_modelopt("e.1", W))
    stacked = Checkpoint.open(folder, device="cuda").linears(["e.0", "e.1"], (160, 192))
    assert stacked.device.type == "cuda"
    assert relative_error(stacked.dequantize(torch.float32)[1].cpu(), W) < 0.12
