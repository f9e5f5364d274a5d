"""Layers of random weights, and a record of what they launch."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tetrad.formats import nvfp4
from tetrad.formats.weights import DenseWeight, Weight, stack
from tetrad.kernels.backend import Backend
from tetrad.kernels.registry import OPS
from tetrad.kernels.select import OP_NAMES, OpSet


class Stored:
    """Random weights, the same for a name each time; those that begin as `quantised` are NVFP4."""

    def __init__(self, *quantised: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self.quantised, self.dtype = quantised, dtype

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=seeded(name)) * 0.1

    def linear(self, module: str, shape: tuple[int, int]) -> Weight:
        matrix = torch.randn(shape, generator=seeded(module)) * shape[1] ** -0.5
        if module.startswith(self.quantised):
            return nvfp4.quantize(matrix)
        return DenseWeight(matrix.to(self.dtype))

    def linears(self, modules: Sequence[str], shape: tuple[int, int]) -> Weight:
        return stack([self.linear(module, shape) for module in modules])


class OnDevice(Stored):
    """The same on the GPU."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return super().tensor(name, shape).cuda()

    def linears(self, modules: Sequence[str], shape: tuple[int, int]) -> Weight:
        return super().linears(modules, shape).to("cuda")

    def linear(self, module: str, shape: tuple[int, int]) -> Weight:
        return super().linear(module, shape).to("cuda")


def seeded(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def torch_ops() -> OpSet:
    return OpSet(**{name: OPS[name].backends["torch"] for name in OP_NAMES}, choices=())


def _launches_nothing(schema: Any) -> bool:
    """Memory without contents, and views of it."""
    (alias, *_) = [result.alias_info for result in schema.returns] or [None]
    return "empty" in schema.name or (alias is not None and not alias.is_write)


class Recorder(TorchDispatchMode):
    """Which ops a call makes, and which of torch's functions it launches outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []
        self.torch: list[str] = []
        self.depth = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self.depth and not _launches_nothing(func._schema):
            self.torch.append(func._schema.name)
        return func(*args, **(kwargs or {}))

    def wrapped(self, ops: OpSet) -> OpSet:
        wrapped: dict[str, Any] = {name: self._wrap(name, ops) for name in OP_NAMES}
        return replace(ops, **wrapped)

    def _wrap(self, name: str, ops: OpSet) -> Backend:
        backend: Backend = getattr(ops, name)

        def run(*args: Any) -> Any:
            self.ops.append(name)
            self.depth += 1
            try:
                return backend.run(*args)
            finally:
                self.depth -= 1

        return replace(backend, run=run)
