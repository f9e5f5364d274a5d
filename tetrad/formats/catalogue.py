"""What a model folder holds: every tensor of its safetensors files, read from the headers alone.

Only safetensors is read. Pickled weights (.bin, .pt) can execute code when they are opened, so they
never are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tetrad.core.errors import CheckpointError
from tetrad.core.jsonfile import read_json_object

INDEX_NAME = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as the header of its file describes it."""

    name: str
    file: Path
    dtype: str
    """safetensors' name: BF16, F16, F32, U8, F8_E4M3, ..."""
    shape: tuple[int, ...]
    nbytes: int
    offset: int
    """Of its first byte in the file."""

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def read_catalogue(folder: Path) -> dict[str, StoredTensor]:
    """Name → tensor for every tensor in `folder`. Raises CheckpointError in one sentence.

    With an index, exactly the files it names are read; without one, every .safetensors file.
    """
    if not folder.is_dir():
        raise CheckpointError(f"There is no model folder at {folder}.")
    index = folder / INDEX_NAME
    if index.is_file():
        return _read_indexed(folder, _read_weight_map(index))
    files = sorted(file for file in folder.glob("*.safetensors") if file.is_file())
    if not files:
        raise CheckpointError(_nothing_to_load(folder))
    return _merge(files)


def _nothing_to_load(folder: Path) -> str:
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLE_SUFFIXES)
    if pickles:
        return (
            f"{folder} holds weights only as pickle ({pickles[0]}), which can run code when it is "
            f"loaded and is therefore never read; convert them to safetensors first."
        )
    return f"{folder} holds no .safetensors file, so there are no weights to load."


def _read_weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map, which says where each tensor is.")
    for name, file in weight_map.items():
        if not isinstance(file, str) or file != Path(file).name:
            raise CheckpointError(
                f"{index} puts tensor '{name}' in {file!r}, which is not a file of that folder."
            )
    return weight_map


def _read_indexed(folder: Path, weight_map: dict[str, str]) -> dict[str, StoredTensor]:
    files = [folder / file for file in sorted(set(weight_map.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of the {len(files)} files that {INDEX_NAME} names, "
            f"the first is {missing[0]}; the download is incomplete."
        )
    catalogue = _merge(files)
    for name, file in weight_map.items():
        found = catalogue.get(name)
        if found is None or found.file.name != file:
            where = f"it is in {found.file.name}" if found else "it is in none of the files"
            raise CheckpointError(
                f"{INDEX_NAME} says that {file} holds tensor '{name}', but {where}; the files and "
                f"the index in {folder} do not belong together."
            )
    return catalogue


def _merge(files: Iterable[Path]) -> dict[str, StoredTensor]:
    catalogue: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in _read_header(file):
            if twin := catalogue.get(tensor.name):
                raise CheckpointError(
                    f"Tensor '{tensor.name}' is in both {twin.file.name} and {file.name}; remove "
                    f"the file that does not belong to this checkpoint."
                )
            catalogue[tensor.name] = tensor
    return catalogue


def _read_header(file: Path) -> list[StoredTensor]:
    """The tensors of one file, after checking that the file is as long as its header says."""
    header, data_start = _parse_header(file)
    header.pop("__metadata__", None)
    tensors = [_stored_tensor(file, data_start, name, entry) for name, entry in header.items()]
    expected = data_start + max((e["data_offsets"][1] for e in header.values()), default=0)
    found = file.stat().st_size
    if found != expected:
        state = "truncated" if found < expected else "longer than its header says"
        raise CheckpointError(
            f"{file} is {state}: {found} bytes, expected {expected}; fetch it again."
        )
    _check_places(file, data_start, tensors)
    return tensors


def _check_places(file: Path, data_start: int, tensors: Iterable[StoredTensor]) -> None:
    """Each byte belongs to one tensor, as the format demands: two that share some would both load,
    and one of them hold the other's numbers."""
    end, before = data_start, ""
    for tensor in sorted(tensors, key=lambda each: (each.offset, each.nbytes)):
        if tensor.offset != end:
            how = "shares bytes with" if tensor.offset < end else "leaves a gap after"
            raise CheckpointError(
                f"{file} is damaged: tensor '{tensor.name}' {how} "
                f"{before or 'the header'}; fetch it again."
            )
        end, before = tensor.offset + tensor.nbytes, f"'{tensor.name}'"


def _parse_header(file: Path) -> tuple[dict[str, Any], int]:
    """The header's JSON and the offset at which the data begins."""
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if prefix == b"version ":
            raise CheckpointError(f"{file} is a Git LFS pointer, not weights; run 'git lfs pull'.")
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > _MAX_HEADER_BYTES:
            raise CheckpointError(f"{file} is not a safetensors file: its header length is wrong.")
        text = stream.read(length)
    if len(text) < length:
        raise CheckpointError(
            f"{file} is truncated: it ends inside its header, after {8 + len(text)} bytes; "
            f"fetch it again."
        )
    try:
        header = json.loads(text, object_pairs_hook=_object_without_twins)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not a safetensors file: {error}.") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} is not a safetensors file: its header is not an object.")
    return header, 8 + length


def _object_without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        twin = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the header names tensor '{twin}' twice")
    return result


def _stored_tensor(file: Path, data_start: int, name: str, entry: Any) -> StoredTensor:
    try:
        start, end = map(_natural, entry["data_offsets"])
        shape = tuple(map(_natural, entry["shape"]))
        tensor = StoredTensor(
            name, file, str(entry["dtype"]), shape, end - start, data_start + start
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{file} is not a safetensors file: its entry for '{name}' is malformed."
        ) from error
    if tensor.nbytes < 0 or (math.prod(shape) > 0) != (tensor.nbytes > 0):
        raise CheckpointError(f"{file} is damaged: tensor '{name}' has {tensor.nbytes} bytes.")
    return tensor


def _natural(value: Any) -> int:
    if type(value) is int and value >= 0:
        return value
    raise ValueError(f"{value!r} is no size")
