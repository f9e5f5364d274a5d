"""A model folder as the model loader sees it: ask for tensors and linears by name.

Files are memory-mapped and each tensor is copied once, straight to where it stays. Everything asked
for is remembered, so that `unread` can list what nobody wanted: a tensor that is silently left out
is how engines have served garbage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tetrad.core.errors import CheckpointError
from tetrad.core.jsonfile import read_json_object
from tetrad.formats.catalogue import StoredTensor, read_catalogue
from tetrad.formats.metadata import QuantMetadata
from tetrad.formats.naming import LinearParts, Names, is_kv_scale
from tetrad.formats.weights import (
    DenseWeight,
    Fp8BlockWeight,
    Fp8TensorWeight,
    Nvfp4Weight,
    Weight,
    block_grid,
    stack,
)

OnBytes = Callable[[int, int], None]
"""Called with (bytes read so far, bytes in the checkpoint) after each tensor."""


_MAX_MAPPED_FILES = 2
"""A layer may lie across the border of two files."""


class Checkpoint:
    """The tensors of a folder. Open it with `Checkpoint.open`."""

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        catalogue: dict[str, StoredTensor],
        device: str,
        on_bytes: OnBytes | None,
    ) -> None:
        self.folder = folder
        self.config = config
        """config.json, parsed."""
        self.device = device
        self.on_bytes = on_bytes
        self.nbytes_total = sum(stored.nbytes for stored in catalogue.values())
        """Bytes of all stored tensors."""
        self.nbytes_read = 0
        self._catalogue = catalogue
        self._metadata = QuantMetadata.read(folder, config)
        self._names = Names(catalogue, self._metadata.hint)
        self._asked: set[str] = set()
        self._files: dict[Path, safe_open] = {}
        self._mixed: list[str] = []

    @classmethod
    def open(cls, folder: Path, device: str = "cpu", on_bytes: OnBytes | None = None) -> Checkpoint:
        """Read the headers of `folder`; weights will be placed on `device`.

        Raises CheckpointError, in one sentence, when files are missing, truncated, duplicated, no
        safetensors, or when there is no config.json.
        """
        catalogue = read_catalogue(folder)
        config = folder / "config.json"
        if not config.is_file():
            raise CheckpointError(f"{folder} holds no config.json, so it is not a model folder.")
        return cls(folder, read_json_object(config), catalogue, device, on_bytes)

    @property
    def names(self) -> list[str]:
        """Every stored tensor's name, sorted."""
        return sorted(self._catalogue)

    def stored(self, name: str) -> StoredTensor:
        """What the header says about `name`, which must be one of `names`."""
        return self._catalogue[name]

    def raw(self, name: str) -> Tensor:
        """The stored bits of `name`, which must be one of `names`, as a tensor of any dtype."""
        return self._place(self._catalogue[name])

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """An unquantised tensor (norm, bias, router), in the dtype it is stored in.

        Raises CheckpointError when it is missing, quantised, or of another shape.
        """
        return self._place(self._names.tensor(name, shape))

    def linear(self, module: str, shape: tuple[int, int]) -> Weight:
        """The weight of linear `module` (a name without ".weight"), logical shape [out, in].

        The format is decided by what is stored. FP8 with one scale per row has no class of its own
        and is dequantised to bfloat16. Raises CheckpointError.
        """
        weight = self._mapped(self._linear_parts(module, shape))
        return self._checked(_copied(weight, self.device), [module])

    def linears(self, modules: Sequence[str], shape: tuple[int, int]) -> Weight:
        """The weights of `modules`, all [out, in], stacked to [E, out, in] in one format.

        Filled expert by expert, so memory never holds the stack twice. When the modules differ in
        format, all are dequantised (bfloat16, or float32 if one is stored so) and `notes` says so:
        correct, at the price of memory. Raises CheckpointError.
        """
        parts = [self._linear_parts(module, shape) for module in modules]
        uniform = len({(part.format, part.weight.dtype) for part in parts}) == 1
        weights = map(self._mapped, parts) if uniform else self._dequantized(parts)
        return self._checked(stack(weights, len(parts), self.device), list(modules))

    def unread(self, ignore: Callable[[str], bool]) -> list[str]:
        """Stored names that nobody asked for, sorted, without those `ignore` accepts.

        Static scales of a quantised key-value cache are never listed.
        """
        left = (name for name in self.names if name not in self._asked)
        return [name for name in left if not is_kv_scale(name) and not ignore(name)]

    @property
    def notes(self) -> list[str]:
        """Sentences a person should see: where metadata and tensors disagree, mixed formats."""
        return self._metadata.notes() + self._mixed

    def _linear_parts(self, module: str, shape: tuple[int, int]) -> LinearParts:
        parts = self._names.linear(module, shape)
        self._metadata.observe(module, parts.format)
        return parts

    def _dequantized(self, parts: Sequence[LinearParts]) -> Iterator[Weight]:
        dtypes = {part.weight.dtype for part in parts if part.format == "bf16"}
        dtype = torch.float32 if "F32" in dtypes or len(dtypes) > 1 else torch.bfloat16
        kinds = sorted({f"{part.format} ({part.weight.dtype})" for part in parts})
        self._mixed.append(
            f"{parts[0].weight.name} and {len(parts) - 1} linears stacked with it are stored in "
            f"several formats ({', '.join(kinds)}); all of them are held as {dtype}."
        )
        return (DenseWeight(self._mapped(part).dequantize(dtype)) for part in parts)

    def _mapped(self, parts: LinearParts) -> Weight:
        """The weight as views of the mapped files where possible."""
        self._asked.update(parts.ignored)
        data = self._read(parts.weight)
        if parts.scale is None:
            return DenseWeight(data)
        scale = self._read(parts.scale)
        if parts.format == "nvfp4":
            assert parts.global_scale is not None, parts
            global_scale = self._read(parts.global_scale).float().reshape(())
            if parts.global_scale_is_divisor:
                global_scale = 1.0 / global_scale
            return Nvfp4Weight(data, scale, global_scale)
        if parts.format == "fp8_tensor":
            return Fp8TensorWeight(data, scale.float().reshape(()))
        if parts.format == "fp8_block":
            return Fp8BlockWeight(data, scale.float().reshape(block_grid(*data.shape)))
        rows = data.float() * scale.float().reshape(-1, 1)
        return DenseWeight(rows.to(torch.bfloat16))

    def _place(self, stored: StoredTensor) -> Tensor:
        return _own(self._read(stored), self.device)

    def _read(self, stored: StoredTensor) -> Tensor:
        """The tensor as a view of its mapped file."""
        try:
            tensor: Tensor = self._file(stored.file).get_tensor(stored.name)  # type: ignore[no-untyped-call]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{stored.file} cannot be read: {error}.") from error
        if stored.name not in self._asked:
            self._asked.add(stored.name)
            self.nbytes_read += stored.nbytes
        if self.on_bytes is not None:
            self.on_bytes(self.nbytes_read, self.nbytes_total)
        return tensor

    def _file(self, file: Path) -> safe_open:
        """Map `file`. Old mappings are dropped: what was read through them counts as memory in use
        for as long as they stand, which would make loading look twice as large as the model."""
        if file not in self._files:
            if len(self._files) >= _MAX_MAPPED_FILES:
                del self._files[next(iter(self._files))]
            self._files[file] = safe_open(file, "pt")
        return self._files[file]

    def _checked(self, weight: Weight, modules: list[str]) -> Weight:
        """Refuse scales that are NaN or infinite: they come from a broken export or a bad disk."""
        for field, tensor in weight.tensors().items():
            if "scale" not in field:
                continue
            bad = _not_finite(tensor).reshape(len(modules), -1).any(dim=1)
            if bad.any():
                module = modules[int(bad.nonzero()[0, 0])]
                raise CheckpointError(
                    f"Linear '{module}' has {field} values that are NaN or infinite; the "
                    f"checkpoint is damaged."
                )
        return weight


def _not_finite(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.float8_e4m3fn:
        return (tensor.view(torch.uint8) & 0x7F) == 0x7F
    return ~torch.isfinite(tensor)


def _copied(weight: Weight, device: str) -> Weight:
    return type(weight)(**{k: _own(tensor, device) for k, tensor in weight.tensors().items()})


def _own(tensor: Tensor, device: str) -> Tensor:
    """A copy that does not depend on the mapped file, which someone may overwrite."""
    return torch.empty_like(tensor, device=device).copy_(tensor)
