"""Which stored tensors make up one linear layer, and in which format.

The format is decided for each linear by what is stored under its name, never by a rule for the
whole model: released checkpoints mix formats between layers, and even inside one expert.

    stored under `module.`                                        written by            format
    weight BF16, F16 or F32                                       everyone              bf16
    weight U8 + weight_scale F8_E4M3 + weight_scale_2             ModelOpt              nvfp4
    weight_packed U8 + weight_scale F8_E4M3 + weight_global_scale compressed-tensors    nvfp4
    weight F8_E4M3 + weight_scale_inv                             DeepSeek, GLM         fp8_block
    weight F8_E4M3 + weight_scale [blocks of 128 x 128]           compressed-tensors    fp8_block
    weight F8_E4M3 + weight_scale scalar                          ModelOpt and others   fp8_tensor
    weight F8_E4M3 + weight_scale per row                         compressed-tensors    fp8_row

compressed-tensors stores the global scale as a divisor. Static activation scales (`input_scale`,
`input_global_scale`) may be there or not; Tetrad keeps activations unquantised and ignores them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tetrad.core.errors import CheckpointError, nearest
from tetrad.formats.catalogue import StoredTensor
from tetrad.formats.weights import FP8_BLOCK, NVFP4_BLOCK, block_grid

DENSE_DTYPES = ("BF16", "F16", "F32")
_INPUT_SCALES = ("input_scale", "input_global_scale")
_KV_SCALES = ("k_scale", "v_scale", "q_scale", "output_scale")

StoredFormat = Literal["bf16", "fp8_tensor", "fp8_row", "fp8_block", "nvfp4"]


@dataclass(frozen=True, slots=True)
class LinearParts:
    """The stored tensors of one linear. `ignored` are read by nobody but belong to it."""

    format: StoredFormat
    weight: StoredTensor
    scale: StoredTensor | None = None
    global_scale: StoredTensor | None = None
    global_scale_is_divisor: bool = False
    ignored: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """Every stored name that belongs to this linear."""
        stored = (self.weight, self.scale, self.global_scale)
        return [tensor.name for tensor in stored if tensor is not None] + list(self.ignored)


class Names:
    """Look-ups in a catalogue; their errors name the tensor, what was expected, what was found."""

    def __init__(self, catalogue: Mapping[str, StoredTensor], hint: str = "") -> None:
        self._catalogue = catalogue
        self._hint = hint
        """A sentence added to errors about missing tensors."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """A tensor that is not quantised. Raises CheckpointError."""
        stored = self._get(name, f"expected {list(shape)}")
        if stored.dtype not in DENSE_DTYPES:
            raise CheckpointError(
                f"Tensor '{name}' must not be quantised: expected {list(shape)} in one of "
                f"{', '.join(DENSE_DTYPES)}, found {stored} in {stored.file.name}."
            )
        return _with_shape(stored, shape, "")

    def linear(self, module: str, shape: tuple[int, int]) -> LinearParts:
        """The parts of linear `module` of logical `shape` [out, in]. Raises CheckpointError."""
        packed, plain = f"{module}.weight_packed", f"{module}.weight"
        if packed in self._catalogue and plain in self._catalogue:
            raise CheckpointError(
                f"Linear '{module}' is stored twice, as '{plain}' and as '{packed}'; keep one."
            )
        if packed in self._catalogue:
            return self._nvfp4(module, packed, "weight_global_scale", shape)
        stored = self._get(plain, f"expected {list(shape)}")
        if stored.dtype in DENSE_DTYPES:
            return LinearParts("bf16", _with_shape(stored, shape, ""))
        if stored.dtype == "U8":
            return self._nvfp4(module, plain, "weight_scale_2", shape)
        if stored.dtype == "F8_E4M3":
            return self._fp8(module, stored, shape)
        raise CheckpointError(
            f"Tensor '{plain}' is stored as {stored}, a format Tetrad does not read; it reads "
            f"{', '.join(DENSE_DTYPES)}, FP8 (F8_E4M3) and NVFP4 (U8)."
        )

    def _nvfp4(
        self, module: str, weight: str, global_scale: str, shape: tuple[int, int]
    ) -> LinearParts:
        out, width = shape
        meaning = f" (NVFP4 of {list(shape)})"
        if width % NVFP4_BLOCK:
            raise CheckpointError(
                f"Tensor '{weight}' is stored as NVFP4, but its width {width} is not a multiple of "
                f"{NVFP4_BLOCK}."
            )
        codes = _expect(self._catalogue[weight], "U8", (out, width // 2), meaning)
        scale_shape = (out, width // NVFP4_BLOCK)
        scale = self._get(f"{module}.weight_scale", f"expected F8_E4M3 {list(scale_shape)}")
        _expect(scale, "F8_E4M3", scale_shape, meaning)
        second = _one_number(self._get(f"{module}.{global_scale}", "expected one F32 number"))
        return LinearParts(
            "nvfp4",
            codes,
            scale,
            second,
            global_scale_is_divisor=global_scale == "weight_global_scale",
            ignored=self._input_scales(module),
        )

    def _fp8(self, module: str, weight: StoredTensor, shape: tuple[int, int]) -> LinearParts:
        meaning = " (FP8)"
        _with_shape(weight, shape, meaning)
        ignored = self._input_scales(module)
        grid = block_grid(*shape)
        if inverse := self._catalogue.get(f"{module}.weight_scale_inv"):
            _scale(inverse, grid, f" (one scale per {FP8_BLOCK} x {FP8_BLOCK} block)")
            return LinearParts("fp8_block", weight, inverse, ignored=ignored)
        scale = self._get(f"{module}.weight_scale", f"the scale of FP8 '{weight.name}'")
        _scale(scale, scale.shape, meaning)
        squeezed = tuple(size for size in scale.shape if size != 1)
        if not squeezed:
            return LinearParts("fp8_tensor", weight, scale, ignored=ignored)
        if squeezed == tuple(size for size in grid if size != 1):
            return LinearParts("fp8_block", weight, scale, ignored=ignored)
        if squeezed == (shape[0],):
            return LinearParts("fp8_row", weight, scale, ignored=ignored)
        raise CheckpointError(
            f"Tensor '{scale.name}' scales FP8 {list(shape)}: expected one number, "
            f"{list(grid)} (128 x 128 blocks) or {[shape[0], 1]} (rows), found {scale} in "
            f"{scale.file.name}."
        )

    def _input_scales(self, module: str) -> tuple[str, ...]:
        names = (f"{module}.{suffix}" for suffix in _INPUT_SCALES)
        return tuple(name for name in names if name in self._catalogue)

    def _get(self, name: str, expected: str) -> StoredTensor:
        stored = self._catalogue.get(name)
        if stored is None:
            raise CheckpointError(
                f"The checkpoint lacks tensor '{name}' ({expected}).{self._nearest(name)}"
                f"{self._hint}"
            )
        return stored

    def _nearest(self, name: str) -> str:
        """Look among the tensors that share the longest dotted prefix: a search over all names of
        a large checkpoint would take minutes."""
        prefix = name
        while "." in prefix:
            prefix = prefix.rpartition(".")[0]
            relatives = [other for other in self._catalogue if other.startswith(prefix + ".")]
            if relatives:
                return nearest(name, relatives[:1000])
        return nearest(name, list(self._catalogue)[:1000])


def is_kv_scale(name: str) -> bool:
    """Whether `name` is a static scale of a quantised key-value cache.

    ModelOpt exports may hold these beside attention. A latent cache has no use for them, so they
    are ignored wherever they are.
    """
    return name.rpartition(".")[2] in _KV_SCALES


def _with_shape(stored: StoredTensor, shape: tuple[int, ...], meaning: str) -> StoredTensor:
    if stored.shape != tuple(shape):
        raise CheckpointError(
            f"Tensor '{stored.name}' has another shape: expected {list(shape)}{meaning}, found "
            f"{stored} in {stored.file.name}."
        )
    return stored


def _expect(stored: StoredTensor, dtype: str, shape: tuple[int, ...], meaning: str) -> StoredTensor:
    if stored.dtype != dtype or stored.shape != shape:
        raise CheckpointError(
            f"Tensor '{stored.name}' does not fit: expected {dtype} {list(shape)}{meaning}, found "
            f"{stored} in {stored.file.name}."
        )
    return stored


def _scale(stored: StoredTensor, shape: tuple[int, ...], meaning: str) -> StoredTensor:
    dtype = stored.dtype if stored.dtype in DENSE_DTYPES else "F32"
    return _expect(stored, dtype, shape, meaning)


def _one_number(stored: StoredTensor) -> StoredTensor:
    shape = (1,) if stored.shape == (1,) else ()
    return _scale(stored, shape, " (one number)")
