"""Writing safetensors files tensor by tensor: the header first, since all sizes are known before.

Memory holds one tensor at a time, whatever the size of a file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from tetrad.formats.catalogue import INDEX_NAME


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor to be written; `dtype` is safetensors' name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def write_shards(
    folder: Path,
    plan: Sequence[PlannedTensor],
    tensors: Iterable[Tensor],
    max_shard_bytes: int,
) -> None:
    """Write `tensors`, which follow `plan` one to one, in files of at most `max_shard_bytes`.

    A tensor larger than that gets a file of its own. With more than one file an index is written.
    """
    shards = list(_split(plan, max_shard_bytes))
    files = [_file_name(number, len(shards)) for number in range(1, len(shards) + 1)]
    source = iter(tensors)
    for file, shard in zip(files, shards, strict=True):
        with (folder / file).open("wb") as stream:
            stream.write(_header(shard))
            for planned in shard:
                _write_tensor(stream, planned, next(source))
    assert next(source, None) is None, "more tensors than planned"
    if len(shards) > 1:
        weight_map = {
            p.name: file for file, shard in zip(files, shards, strict=True) for p in shard
        }
        total = sum(planned.nbytes for planned in plan)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _split(plan: Sequence[PlannedTensor], max_bytes: int) -> Iterator[list[PlannedTensor]]:
    shard: list[PlannedTensor] = []
    size = 0
    for planned in plan:
        if shard and size + planned.nbytes > max_bytes:
            yield shard
            shard, size = [], 0
        shard.append(planned)
        size += planned.nbytes
    yield shard


def _file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def _header(shard: Sequence[PlannedTensor]) -> bytes:
    """Length and JSON, padded with spaces so that the data begins at a multiple of 8."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for planned in shard:
        end = offset + planned.nbytes
        entries[planned.name] = {
            "dtype": planned.dtype,
            "shape": list(planned.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_tensor(stream: BinaryIO, planned: PlannedTensor, tensor: Tensor) -> None:
    assert tuple(tensor.shape) == planned.shape, (planned, tensor.shape)
    assert tensor.nbytes == planned.nbytes, (planned, tensor.nbytes)
    flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    stream.write(flat.numpy().data)
