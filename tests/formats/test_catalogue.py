"""Folders that cannot be loaded: each is refused in one sentence that says what is wrong."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch

from tests.formats.folders import write_folder, write_index
from tetrad.core.errors import CheckpointError
from tetrad.formats.catalogue import INDEX_NAME, read_catalogue
from tetrad.formats.checkpoint import Checkpoint

A = {"a.weight": torch.ones(2, 3)}
B = {"b.weight": torch.zeros(4, dtype=torch.bfloat16)}


def refusal(folder: Path) -> str:
    """The message of the error, which must be one sentence on one line."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith((".", "?"))
    return message


def test_a_single_file(tmp_path: Path):
    catalogue = read_catalogue(write_folder(tmp_path, A | B))
    assert sorted(catalogue) == ["a.weight", "b.weight"]
    stored = catalogue["b.weight"]
    assert (stored.dtype, stored.shape, stored.nbytes) == ("BF16", (4,), 8)
    assert stored.file.name == "model.safetensors"


def test_shards_with_an_index(tmp_path: Path):
    catalogue = read_catalogue(write_folder(tmp_path, A, B))
    assert {name: stored.file.name for name, stored in catalogue.items()} == {
        "a.weight": "model-00001.safetensors",
        "b.weight": "model-00002.safetensors",
    }


def test_shards_without_an_index(tmp_path: Path):
    assert len(read_catalogue(write_folder(tmp_path, A, B, index=False))) == 2


def test_a_scalar_and_an_empty_tensor(tmp_path: Path):
    tensors = {"scalar": torch.tensor(2.0), "empty": torch.zeros(0, 4)}
    catalogue = read_catalogue(write_folder(tmp_path, tensors))
    assert catalogue["scalar"].shape == ()
    assert catalogue["empty"].nbytes == 0


def test_a_file_that_the_index_does_not_name_is_left_alone(tmp_path: Path):
    """Releases sometimes carry the same weights a second time, in one consolidated file."""
    write_folder(tmp_path, A, B)
    (tmp_path / "consolidated.safetensors").write_bytes(
        (tmp_path / "model-00001.safetensors").read_bytes()
    )
    assert len(read_catalogue(tmp_path)) == 2


def test_no_folder(tmp_path: Path):
    assert "no model folder at" in refusal(tmp_path / "absent")


def test_no_config(tmp_path: Path):
    write_folder(tmp_path, A)
    (tmp_path / "config.json").unlink()
    assert "holds no config.json" in refusal(tmp_path)


def test_config_is_not_json(tmp_path: Path):
    write_folder(tmp_path, A)
    (tmp_path / "config.json").write_text("{'single': 1}")
    assert "config.json is not valid JSON" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    assert "must hold a JSON object, not list" in refusal(tmp_path)
    for endless in ("[" * 100_000, '{"a": ' + "1" * 10_000 + "}"):
        (tmp_path / "config.json").write_text(endless)
        assert "config.json is not valid JSON" in refusal(tmp_path)


def test_no_weights(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    assert "holds no .safetensors file" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "last.ckpt"])
def test_pickles_are_never_read(tmp_path: Path, name: str):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    message = refusal(tmp_path)
    assert name in message
    assert "convert them to safetensors" in message


def test_a_missing_shard(tmp_path: Path):
    write_folder(tmp_path, A, B)
    (tmp_path / "model-00002.safetensors").unlink()
    message = refusal(tmp_path)
    assert "lacks 1 of the 2 files" in message
    assert "model-00002.safetensors" in message


def test_an_index_that_names_an_absent_tensor(tmp_path: Path):
    write_folder(tmp_path, A, B)
    write_index(tmp_path, {"a.weight": "model-00001.safetensors", "c": "model-00002.safetensors"})
    assert "holds tensor 'c', but it is in none of the files" in refusal(tmp_path)


def test_an_index_that_puts_a_tensor_in_the_wrong_file(tmp_path: Path):
    write_folder(tmp_path, A, B)
    write_index(tmp_path, dict.fromkeys(("a.weight", "b.weight"), "model-00002.safetensors"))
    assert "'a.weight', but it is in none of the files" in refusal(tmp_path)
    swapped = {"a.weight": "model-00002.safetensors", "b.weight": "model-00001.safetensors"}
    write_index(tmp_path, swapped)
    assert "'a.weight', but it is in model-00001.safetensors" in refusal(tmp_path)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", 7])
def test_an_index_cannot_point_out_of_the_folder(tmp_path: Path, file: object):
    write_folder(tmp_path, A)
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a.weight": file}}))
    assert "is not a file of that folder" in refusal(tmp_path)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_an_index_without_a_map(tmp_path: Path, text: str):
    write_folder(tmp_path, A)
    (tmp_path / INDEX_NAME).write_text(text)
    assert "has no weight_map" in refusal(tmp_path)


@pytest.mark.parametrize("index", [False, True])
def test_a_tensor_in_two_files(tmp_path: Path, index: bool):
    write_folder(tmp_path, A | B, B, index=index)
    message = refusal(tmp_path)
    assert "Tensor 'b.weight' is in both model-00001.safetensors and model-000" in message


def test_a_truncated_file(tmp_path: Path):
    file = write_folder(tmp_path, A) / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    size = len(whole)
    assert f"is truncated: {size - 5} bytes, expected {size}" in refusal(tmp_path)
    file.write_bytes(whole[:20])
    assert "is truncated: it ends inside its header" in refusal(tmp_path)
    file.write_bytes(whole + b"x")
    assert "is longer than its header says" in refusal(tmp_path)


def test_a_file_that_is_something_else(tmp_path: Path):
    file = write_folder(tmp_path, A) / "model.safetensors"
    file.write_bytes(b"")
    assert "is not a safetensors file" in refusal(tmp_path)
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "is a Git LFS pointer" in refusal(tmp_path)
    file.write_bytes((2**62).to_bytes(8, "little") + b"{}")
    assert "its header length is wrong" in refusal(tmp_path)
    file.write_bytes((2).to_bytes(8, "little") + b"{]")
    assert "is not a safetensors file" in refusal(tmp_path)
    file.write_bytes((2).to_bytes(8, "little") + b"[]")
    assert "its header is not an object" in refusal(tmp_path)
    for endless in (b"[" * 100_000, b'{"a":' * 100_000, b'{"a":' + b"1" * 10_000 + b"}"):
        file.write_bytes(len(endless).to_bytes(8, "little") + endless)
        assert "is not a safetensors file" in refusal(tmp_path)


@pytest.mark.timeout(20)
def test_what_only_looks_like_a_file_is_not_read(tmp_path: Path):
    """Reading a pipe would wait for ever."""
    write_folder(tmp_path, A)
    (tmp_path / "folder.safetensors").mkdir()
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert sorted(read_catalogue(tmp_path)) == ["a.weight"]


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2]},
        {"dtype": "F32", "shape": None, "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [float("inf")], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": ["0", "8"]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0.5, 8.5]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [False, 8]},
        [],
    ],
)
def test_a_malformed_header(tmp_path: Path, entry: object):
    file = write_folder(tmp_path, A) / "model.safetensors"
    text = json.dumps({"a": entry}).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    assert "its entry for 'a' is malformed" in refusal(tmp_path)


def test_a_header_that_names_a_tensor_twice(tmp_path: Path):
    file = write_folder(tmp_path, A) / "model.safetensors"
    entry = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
    text = f'{{"a":{entry},"a":{entry}}}'.encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    assert re.search("names tensor 'a' twice", refusal(tmp_path))


def test_offsets_that_contradict_the_shape(tmp_path: Path):
    """The header is believed only as far as its sizes agree."""
    file = write_folder(tmp_path, A) / "model.safetensors"
    text = b'{"a.weight":{"dtype":"F32","shape":[4],"data_offsets":[0,8]}}'
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    checkpoint = Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match=r"is damaged: 'a.weight' is F32 \[4\] in 8 bytes"):
        checkpoint.tensor("a.weight", (4,))


@pytest.mark.parametrize(
    ("start", "how"),
    [(4, "shares bytes with"), (0, "shares bytes with"), (24, "leaves a gap after")],
)
def test_tensors_that_share_bytes_or_leave_some_out(tmp_path: Path, start: int, how: str):
    """Two that share bytes would both load, and one of them mean something else."""
    file = write_folder(tmp_path, A) / "model.safetensors"
    entry = {"dtype": "F32", "shape": [4]}
    header = {
        "b": entry | {"data_offsets": [start, start + 16]},
        "a": entry | {"data_offsets": [0, 16]},
    }
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(max(16, start + 16)))
    message = refusal(tmp_path)
    assert "is damaged: tensor '" in message
    assert how in message
