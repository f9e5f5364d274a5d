"""Reading in parallel: right bytes, bounded memory, and files that fail on the way."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.formats.folders import as_modelopt, matrix, write_folder
from tetrad.core.errors import CheckpointError
from tetrad.formats import reader
from tetrad.formats.catalogue import read_catalogue
from tetrad.formats.checkpoint import Checkpoint
from tetrad.formats.reader import DTYPES, Reader, empty_for

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
MB = 1 << 20


def kilobytes(name: str) -> int:
    match = re.search(rf"{name}:\s+(\d+) kB", STATUS.read_text())
    assert match is not None
    return int(match[1])


def large(num_bytes: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


def expert(seed: int) -> Tensor:
    """bf16 [2048, 4096]"""
    return large(16 * MB, seed).view(torch.bfloat16).view(2048, 4096).clone()


def test_large_tensors_of_several_files_are_read_by_several_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Pieces end in the middle of a tensor, and the last is shorter."""
    monkeypatch.setattr(reader, "PIECE_BYTES", 300_001)
    tensors = [{f"t{i}": large(2 * MB + i, i)} for i in range(4)]
    folder = write_folder(tmp_path, *tensors)
    names: set[str] = set()
    read_into = reader._read_into

    def noted(piece: reader._Piece, memory: Tensor) -> None:
        names.add(threading.current_thread().name)
        read_into(piece, memory)

    monkeypatch.setattr(reader, "_read_into", noted)
    catalogue = read_catalogue(folder)
    targets = [(catalogue[f"t{i}"], empty_for(catalogue[f"t{i}"], "cpu")) for i in range(4)]
    seen: dict[str, int] = {}
    ours = Reader()
    ours.fill(
        targets, lambda stored, n: seen.__setitem__(stored.name, seen.get(stored.name, 0) + n)
    )
    ours.close()
    for number, (_, found) in enumerate(targets):
        assert torch.equal(found, tensors[number][f"t{number}"])
    assert seen == {f"t{i}": 2 * MB + i for i in range(4)}
    assert len(names) > 1
    assert threading.current_thread().name not in names


def test_a_few_bytes_wake_no_thread(tmp_path: Path):
    folder = write_folder(
        tmp_path, {"a": torch.arange(5), "b": torch.tensor(2.5), "c": torch.ones(0)}
    )
    catalogue = read_catalogue(folder)
    targets = [(catalogue[name], empty_for(catalogue[name], "cpu")) for name in "abc"]
    ours = Reader()
    ours.fill(targets, lambda _stored, _bytes: None)
    assert ours._threads is None
    assert [found.tolist() for _, found in targets] == [[0, 1, 2, 3, 4], 2.5, []]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_type_is_read_as_it_was_written(tmp_path: Path, dtype: torch.dtype):
    values = torch.randint(0, 2, (3, 5)).to(dtype)
    save_file({"a": values}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    found = Checkpoint.open(tmp_path).raw("a")
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), values.view(torch.uint8))


def test_a_file_that_shrinks_or_goes_is_an_error(tmp_path: Path):
    folder = write_folder(tmp_path, {"a": large(3 * MB, 0)})
    checkpoint = Checkpoint.open(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: 2 * MB])
    with pytest.raises(CheckpointError, match="cannot be read: it became shorter"):
        checkpoint.raw("a")
    file.unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read: .*No such file"):
        checkpoint.raw("a")


def test_a_type_that_torch_has_not_is_named(tmp_path: Path):
    text = b'{"a":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}'
    data = len(text).to_bytes(8, "little") + text + bytes(2)
    (tmp_path / "model.safetensors").write_bytes(data)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="'a' as F4, which is not a type that Tetrad reads"):
        Checkpoint.open(tmp_path).raw("a")


@pytest.mark.skipif(not CLEAR.exists(), reason="needs Linux's account of memory")
def test_a_stack_is_in_memory_once(tmp_path: Path):
    """Also while it is filled: at most a few pieces more."""
    experts = {f"e.{i}.weight": expert(i) for i in range(8)}
    folder = write_folder(tmp_path, experts)
    del experts
    checkpoint = Checkpoint.open(folder)
    before = kilobytes("VmRSS")
    CLEAR.write_text("5")  # the peak begins anew
    stacked = checkpoint.linears([f"e.{i}" for i in range(8)], (2048, 4096))
    peak = kilobytes("VmHWM")
    checkpoint.close()
    assert stacked.nbytes == 128 * MB
    assert (peak - before) * 1024 < 1.2 * stacked.nbytes


@pytest.mark.gpu
def test_a_gpu_gets_the_same_bytes_while_it_computes(tmp_path: Path):
    """Memory that a running kernel still reads may be handed out again; reading waits for it."""
    modules = [f"e.{i}" for i in range(6)]
    tensors: dict[str, Tensor] = {"big": large(70 * MB, 9)}
    for seed, module in enumerate(modules):
        tensors |= as_modelopt(module, matrix(1024, 2048, seed))
    folder = write_folder(tmp_path, tensors)
    cpu, gpu = Checkpoint.open(folder), Checkpoint.open(folder, device="cuda")
    for _ in range(5):
        busy = torch.randn(8192, 8192, device="cuda")
        product = busy @ busy
        scratch = torch.full((70 * MB,), 7, dtype=torch.uint8, device="cuda")
        copy = scratch.clone()
        del scratch
        assert torch.equal(gpu.raw("big").cpu(), tensors["big"])
        assert int((copy != 7).sum()) == 0
        del busy, product
    ours, theirs = gpu.linears(modules, (1024, 2048)), cpu.linears(modules, (1024, 2048))
    for name, tensor in theirs.tensors().items():
        found = ours.tensors()[name]
        assert found.device.type == "cuda"
        assert torch.equal(found.cpu().view(torch.uint8), tensor.view(torch.uint8))
