"""A model folder as the model loader sees it: ask for tensors and linears by name.

Each tensor is read once, straight to where it stays. Everything asked for is remembered, so that
`unread` can list what nobody wanted: a tensor that is silently left out is how engines have served
garbage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tetrad.core.errors import CheckpointError
from tetrad.core.jsonfile import read_json_object
from tetrad.formats.catalogue import StoredTensor, read_catalogue
from tetrad.formats.metadata import QuantMetadata
from tetrad.formats.naming import LinearParts, Names, is_kv_scale
from tetrad.formats.reader import ALONE_BYTES, Reader, Target, empty_for
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
        self._reader = Reader()
        self.read_s = 0.0
        """Seconds that reading has taken."""
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
        weight = self._loaded([self._linear_parts(module, shape)])
        alone = {name: tensor[0] for name, tensor in weight.tensors().items()}
        return self._checked(type(weight)(**alone), [module])

    def linears(self, modules: Sequence[str], shape: tuple[int, int]) -> Weight:
        """The weights of `modules`, all [out, in], stacked to [E, out, in] in one format.

        Read into one stack, so that memory never holds it twice. When the modules differ in
        format, all are dequantised (bfloat16, or float32 if one is stored so) and `notes` says so:
        correct, at the price of memory. Raises CheckpointError.
        """
        parts = [self._linear_parts(module, shape) for module in modules]
        if len({(part.format, part.weight.dtype) for part in parts}) == 1:
            weight = self._loaded(parts)
        else:
            weight = stack(self._dequantized(parts), len(parts), self.device)
        return self._checked(weight, list(modules))

    def close(self) -> None:
        """End what reads. More can be asked for afterwards."""
        self._reader.close()

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
        return (DenseWeight(self._loaded([part]).dequantize(dtype)[0]) for part in parts)

    def _loaded(self, parts: Sequence[LinearParts]) -> Weight:
        """The weights of parts in one format, stacked to [E, out, in]."""
        self._asked.update(name for part in parts for name in part.ignored)
        data = self._stack([part.weight for part in parts])
        scales = [part.scale for part in parts if part.scale is not None]
        if not scales:
            return DenseWeight(data)
        scale = self._stack(scales)
        form = parts[0].format
        if form == "nvfp4":
            return Nvfp4Weight(data, scale, self._global_scales(parts))
        if form == "fp8_tensor":
            return Fp8TensorWeight(data, scale.float().reshape(len(parts)))
        if form == "fp8_block":
            grid = block_grid(*data.shape[1:])
            return Fp8BlockWeight(data, scale.float().reshape(len(parts), *grid))
        rows = torch.empty_like(data, dtype=torch.bfloat16)
        for each, stored, factor in zip(rows, data, scale, strict=True):
            each.copy_(stored.float() * factor.float().reshape(-1, 1))
        return DenseWeight(rows)

    def _global_scales(self, parts: Sequence[LinearParts]) -> Tensor:
        """[E] in fp32, to multiply with."""
        found = [part.global_scale for part in parts if part.global_scale is not None]
        assert len(found) == len(parts), parts
        scales = self._stack(found).float().reshape(len(parts))
        divides = torch.tensor([part.global_scale_is_divisor for part in parts])
        return torch.where(divides.to(scales.device), 1.0 / scales, scales)

    def _stack(self, stored: Sequence[StoredTensor]) -> Tensor:
        """Tensors of one type and size along a new leading axis; of several types, in fp32."""
        if len({(each.dtype, each.nbytes) for each in stored}) > 1:
            return torch.stack([self._place(each).float().flatten() for each in stored])
        stacked = empty_for(stored[0], self._first_place(stored), len(stored))
        self._fill(list(zip(stored, stacked, strict=True)))
        return stacked.to(self.device)

    def _place(self, stored: StoredTensor) -> Tensor:
        tensor = empty_for(stored, self._first_place([stored]))
        self._fill([(stored, tensor)])
        return tensor.to(self.device)

    def _first_place(self, stored: Sequence[StoredTensor]) -> str:
        """Where they are read to: main memory first, if there are only a few bytes."""
        is_small = sum(each.nbytes for each in stored) < ALONE_BYTES
        return "cpu" if is_small else self.device

    def _fill(self, targets: Sequence[Target]) -> None:
        """Read, and count each byte once however often it is asked for."""
        fresh = {stored.name for stored, _ in targets} - self._asked
        self._asked |= fresh

        def count(stored: StoredTensor, num_bytes: int) -> None:
            if stored.name in fresh:
                self.nbytes_read += num_bytes
            if self.on_bytes is not None:
                self.on_bytes(self.nbytes_read, self.nbytes_total)

        began = time.perf_counter()
        self._reader.fill(targets, count)
        self.read_s += time.perf_counter() - began

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
