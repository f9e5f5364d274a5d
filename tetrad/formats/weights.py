"""A weight as it is stored: one class per format, with the arithmetic that gives its values.

Shapes are written [..., out, in]; a stack of experts carries a leading axis E. A weight stays in
its stored format in memory: kernels read the fields, references call `dequantize`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass, fields
from typing import ClassVar, Self, TypeAlias

import torch
from torch import Tensor

from tetrad.formats import e2m1

NVFP4_BLOCK = 16
"""Values along `in` that share one NVFP4 block scale."""
FP8_BLOCK = 128
"""Rows and columns that share one FP8 block scale."""
INT_BLOCK = 32
"""Values along `in` that share a scale and a minimum."""
E4M3_MAX = 448.0
"""The largest e4m3 number."""


def block_grid(out: int, width: int) -> tuple[int, int]:
    """How many FP8 blocks cover [out, in]; the last of each row and column may be partial."""
    return -(-out // FP8_BLOCK), -(-width // FP8_BLOCK)


class HoldsTensors:
    """A dataclass whose fields are tensors, or others that hold some, among what else it knows."""

    @property
    def nbytes(self) -> int:
        """Bytes in memory; what stands in two fields counts once."""
        held = {id(part): part for part in (getattr(self, f.name) for f in fields(self))}  # type: ignore[arg-type]
        return sum(p.nbytes for p in held.values() if isinstance(p, Tensor | HoldsTensors))


class _Stored(HoldsTensors):
    """What the formats have in common. Subclasses are dataclasses whose fields are tensors."""

    format_name: ClassVar[str]

    @property
    def shape(self) -> torch.Size:
        """Logical shape [..., out, in], whatever the packing."""
        raise NotImplementedError

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The values, [..., out, in]. Computed in float32, rounded once to `dtype`."""
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """Field name → tensor."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    @property
    def device(self) -> torch.device:
        """Where the data lies."""
        return next(iter(self.tensors().values())).device

    def to(self, device: torch.device | str) -> Self:
        """The same weight on `device`."""
        return type(self)(**{name: tensor.to(device) for name, tensor in self.tensors().items()})


@dataclass(frozen=True, eq=False)
class DenseWeight(_Stored):
    """Not quantised: bfloat16, float16 or float32 as stored."""

    data: Tensor
    """[..., out, in]"""

    format_name: ClassVar[str] = "bf16"

    def __post_init__(self) -> None:
        assert self.data.dtype in (torch.bfloat16, torch.float16, torch.float32), self.data.dtype

    @property
    def shape(self) -> torch.Size:
        """[..., out, in]"""
        return self.data.shape

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The data in `dtype`; not a copy when it has that type already."""
        return self.data.to(dtype)


@dataclass(frozen=True, eq=False)
class Fp8TensorWeight(_Stored):
    """FP8 with one scale per matrix: value = data * scale."""

    data: Tensor
    """float8_e4m3fn [..., out, in]"""
    scale: Tensor
    """float32 [...]"""

    format_name: ClassVar[str] = "fp8_tensor"

    def __post_init__(self) -> None:
        assert self.data.dtype == torch.float8_e4m3fn, self.data.dtype
        assert self.scale.dtype == torch.float32, self.scale.dtype
        assert self.scale.shape == self.data.shape[:-2], (self.scale.shape, self.data.shape)

    @property
    def shape(self) -> torch.Size:
        """[..., out, in]"""
        return self.data.shape

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """data * scale."""
        return (self.data.float() * self.scale[..., None, None]).to(dtype)


@dataclass(frozen=True, eq=False)
class Fp8BlockWeight(_Stored):
    """FP8 with one scale per 128 x 128 block; blocks at the edges may be smaller.

    value[i, j] = data[i, j] * scale_inv[i // 128, j // 128]. The name `scale_inv` is DeepSeek's: it
    is the inverse of what was multiplied when quantising, so it multiplies here.
    """

    data: Tensor
    """float8_e4m3fn [..., out, in]"""
    scale_inv: Tensor
    """float32 [..., ceil(out / 128), ceil(in / 128)]"""

    format_name: ClassVar[str] = "fp8_block"

    def __post_init__(self) -> None:
        assert self.data.dtype == torch.float8_e4m3fn, self.data.dtype
        assert self.scale_inv.dtype == torch.float32, self.scale_inv.dtype
        grid = (*self.data.shape[:-2], *block_grid(*self.data.shape[-2:]))
        assert self.scale_inv.shape == grid, (self.scale_inv.shape, grid)

    @property
    def shape(self) -> torch.Size:
        """[..., out, in]"""
        return self.data.shape

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """data times its block's scale."""
        out, width = self.shape[-2:]
        scale = self.scale_inv.repeat_interleave(FP8_BLOCK, dim=-2)[..., :out, :]
        scale = scale.repeat_interleave(FP8_BLOCK, dim=-1)[..., :width]
        return (self.data.float() * scale).to(dtype)


@dataclass(frozen=True, eq=False)
class Nvfp4Weight(_Stored):
    """Four-bit floats with two levels of scale: value = e2m1(code) * scale * global_scale.

    code and scale have 2 and 4 significant bits, so their product is exact in bfloat16 (and
    float32); only the global scale rounds. Each matrix has its own global scale: the gate and up
    projections of one expert may differ.
    """

    codes: Tensor
    """uint8 [..., out, in / 2]; the even column in the low nibble"""
    scales: Tensor
    """float8_e4m3fn [..., out, in / 16], row-major"""
    global_scale: Tensor
    """float32 [...]"""

    format_name: ClassVar[str] = "nvfp4"

    def __post_init__(self) -> None:
        assert self.codes.dtype == torch.uint8, self.codes.dtype
        assert self.scales.dtype == torch.float8_e4m3fn, self.scales.dtype
        assert self.global_scale.dtype == torch.float32, self.global_scale.dtype
        blocks = (*self.shape[:-1], self.shape[-1] // NVFP4_BLOCK)
        assert self.scales.shape == blocks, (self.scales.shape, blocks)
        assert self.global_scale.shape == self.shape[:-2], self.global_scale.shape

    @property
    def shape(self) -> torch.Size:
        """[..., out, in]"""
        return torch.Size((*self.codes.shape[:-1], self.codes.shape[-1] * 2))

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """e2m1(code) * scale * global_scale, the first product exact."""
        blocks = e2m1.decode(self.codes).view(*self.scales.shape, NVFP4_BLOCK)
        values = (blocks * self.scales.float()[..., None]).view(self.shape)
        return (values * self.global_scale[..., None, None]).to(dtype)


@dataclass(frozen=True, eq=False)
class Int4Weight(_Stored):
    """Four-bit integers in blocks of 32 along `in`: value = code * scale + minimum.

    What ggml calls Q4_1, and Q4_0 with a minimum of -8 scale.
    """

    codes: Tensor
    """uint8 [..., out, in / 2]; the even column in the low nibble"""
    scales: Tensor
    """float32 [..., out, in / 32]"""
    minimums: Tensor
    """float32 [..., out, in / 32]"""

    format_name: ClassVar[str] = "int4"

    def __post_init__(self) -> None:
        assert self.codes.dtype == torch.uint8, self.codes.dtype
        blocks = (*self.shape[:-1], self.shape[-1] // INT_BLOCK)
        for part in (self.scales, self.minimums):
            assert part.dtype == torch.float32, part.dtype
            assert part.shape == blocks, (part.shape, blocks)

    @property
    def shape(self) -> torch.Size:
        """[..., out, in]"""
        return torch.Size((*self.codes.shape[:-1], self.codes.shape[-1] * 2))

    def unpacked(self) -> Tensor:
        """The codes, uint8 [..., out, in]."""
        return torch.stack([self.codes & 15, self.codes >> 4], dim=-1).flatten(-2)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """code * scale + minimum."""
        blocks = self.unpacked().float().view(*self.scales.shape, INT_BLOCK)
        values = blocks * self.scales[..., None] + self.minimums[..., None]
        return values.view(self.shape).to(dtype)


@dataclass(frozen=True, eq=False)
class Int8Weight(_Stored):
    """Eight-bit integers with one scale per row: value = data * scale."""

    data: Tensor
    """int8 [..., out, in]"""
    scale: Tensor
    """float32 [..., out]"""

    format_name: ClassVar[str] = "int8"

    def __post_init__(self) -> None:
        assert self.data.dtype == torch.int8, self.data.dtype
        assert self.scale.dtype == torch.float32, self.scale.dtype
        assert self.scale.shape == self.data.shape[:-1], (self.scale.shape, self.data.shape)

    @property
    def shape(self) -> torch.Size:
        """[..., out, in]"""
        return self.data.shape

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """data * scale."""
        return (self.data.float() * self.scale[..., None]).to(dtype)


@dataclass(frozen=True, eq=False)
class Int8BlockWeight(_Stored):
    """Eight-bit integers in blocks of 32 along `in`: value = data * scale. ggml's Q8_0."""

    data: Tensor
    """int8 [..., out, in]"""
    scales: Tensor
    """float32 [..., out, in / 32]"""

    format_name: ClassVar[str] = "int8_block"

    def __post_init__(self) -> None:
        assert self.data.dtype == torch.int8, self.data.dtype
        assert self.scales.dtype == torch.float32, self.scales.dtype
        blocks = (*self.data.shape[:-1], self.data.shape[-1] // INT_BLOCK)
        assert self.scales.shape == blocks, (self.scales.shape, blocks)

    @property
    def shape(self) -> torch.Size:
        """[..., out, in]"""
        return self.data.shape

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """data times its block's scale."""
        blocks = self.data.float().view(*self.scales.shape, INT_BLOCK)
        return (blocks * self.scales[..., None]).view(self.shape).to(dtype)


Weight: TypeAlias = (
    DenseWeight
    | Fp8TensorWeight
    | Fp8BlockWeight
    | Nvfp4Weight
    | Int4Weight
    | Int8Weight
    | Int8BlockWeight
)


def joined(weights: Sequence[Weight]) -> Weight | None:
    """Matrices [out, in] as one above the other; None where their format does not allow it
    without decoding: other formats side by side, or scales that rows of several matrices share."""
    kinds = {type(weight) for weight in weights}
    if len(kinds) > 1 or not kinds <= {DenseWeight, Int4Weight, Int8Weight, Int8BlockWeight}:
        return None
    parts = [weight.tensors() for weight in weights]
    if any(len({part[name].dtype for part in parts}) > 1 for name in parts[0]):
        return None
    return kinds.pop()(**{name: torch.cat([part[name] for part in parts]) for name in parts[0]})


def stack(
    weights: Iterable[Weight],
    num_weights: int | None = None,
    device: torch.device | str | None = None,
) -> Weight:
    """Stack weights of one format and shape along a new leading axis, on `device`.

    `weights` may be an iterator when `num_weights` is given: the result is allocated once and
    filled weight by weight, so that a layer of experts is never held twice.
    """
    if num_weights is None:
        assert isinstance(weights, Sized), "num_weights is needed when weights is an iterator"
        num_weights = len(weights)
    stacked: dict[str, Tensor] = {}
    kind: type[Weight] | None = None
    filled = 0
    for filled, weight in enumerate(weights, start=1):
        if kind is None:
            kind = type(weight)
            stacked = {
                name: part.new_empty((num_weights, *part.shape), device=device)
                for name, part in weight.tensors().items()
            }
        assert type(weight) is kind, f"cannot stack {weight.format_name} onto {kind.format_name}"
        for name, part in weight.tensors().items():
            assert part.dtype == stacked[name].dtype, (part.dtype, stacked[name].dtype)
            stacked[name][filled - 1].copy_(part)
    assert kind is not None, "nothing to stack"
    assert filled == num_weights, (filled, num_weights)
    return kind(**stacked)
