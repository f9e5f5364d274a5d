"""Experts as the grouped kernels take them, and which stored formats can become that."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tetrad.formats.weights import (
    Fp8BlockWeight,
    Fp8TensorWeight,
    HoldsTensors,
    Nvfp4Weight,
    Weight,
)
from tetrad.kernels.experts import reference
from tetrad.kernels.experts.packing import GRANULE_COLUMNS, TILE_ROWS
from tetrad.kernels.experts.packing_fp8 import pack_fp8
from tetrad.kernels.experts.reference import DenseExperts, StoredExperts
from tetrad.kernels.experts.triton_packing import pack
from tetrad.kernels.experts.weights import ExpertWeights

_log = logging.getLogger(__name__)
MOST_IN_PARTS = 128
"""Token tiles of a launch whose weight tiles several programs may share."""


@dataclass(frozen=True, eq=False)
class Operand(HoldsTensors):
    """The weights of one product of all experts."""

    first: Tensor
    """NVFP4, FP8: the words. Dense: bf16 [E, features, width] of gate or down."""
    second: Tensor
    """NVFP4, FP8: the scales. Dense: up, or down again."""
    global_scale: Tensor
    """float32 [E, parts]; read for NVFP4 alone."""
    is_packed: bool
    """NVFP4, in the order of `packing.py`."""
    features: int
    """Output features of a row: F for gate and up together, D for down."""
    width: int
    """Columns of the matrices: D for gate and up, F for down."""
    features_per_tile: int
    is_fp8: bool = False
    """In the order of `packing_fp8.py`."""
    arrived: Tensor | None = None
    """NVFP4 gate and up: int32 zeros, one for each weight tile of MOST_IN_PARTS token tiles, by
    which the programs of one know the last. A launch leaves zeros; two at once would not."""

    @property
    def num_columns(self) -> int:
        """Weight tiles of one expert."""
        return -(-self.features // self.features_per_tile)

    @property
    def granules(self) -> int:
        """Granules of one weight tile."""
        return -(-self.width // GRANULE_COLUMNS)


@dataclass(frozen=True, eq=False)
class GroupedExperts(HoldsTensors):
    """The experts of one layer, ready for two grouped products."""

    gate_up: Operand
    down: Operand
    num_experts: int
    num_routed: int
    """Experts that the tokens choose among, those of other ranks included."""


Prepared = GroupedExperts | DenseExperts | StoredExperts


def why_not(weight: ExpertWeights, dtype: torch.dtype) -> str | None:
    """None, or why these experts cannot be grouped."""
    if dtype != torch.bfloat16:
        return f"activations are {str(dtype).removeprefix('torch.')} and not bfloat16"
    if type(weight.gate) is not type(weight.up):
        return f"gate is {weight.gate.format_name} and up {weight.up.format_name}"
    return None


def prepare(weight: ExpertWeights, dtype: torch.dtype) -> Prepared:
    """Pack a layer's experts. Those that cannot be grouped stay with the plain torch backend."""
    if (reason := why_not(weight, dtype)) is not None:
        _tell_once(reason)
        return reference.prepare(weight, dtype)
    num_experts = weight.num_experts
    return GroupedExperts(
        _operand((weight.gate, weight.up)),
        _operand((weight.down,)),
        num_experts,
        weight.num_routed or num_experts,
    )


@functools.cache
def _tell_once(reason: str) -> None:
    _log.warning("Experts run on plain torch, many times slower: %s.", reason)


def _operand(parts: tuple[Weight, ...]) -> Operand:
    """Gate and up, or down alone. NVFP4 and FP8 are packed, dense weights become bf16."""
    _, features, width = parts[0].shape
    sizes = (features, width, TILE_ROWS // len(parts))
    quantised = tuple(part for part in parts if isinstance(part, Nvfp4Weight))
    if quantised:
        packed = pack(quantised)
        operand = Operand(packed.words, packed.scales, packed.global_scale, True, *sizes)
        size = MOST_IN_PARTS * operand.num_columns if len(parts) > 1 else 0
        arrived = torch.zeros(size, dtype=torch.int32, device=packed.words.device)
        return replace(operand, arrived=arrived)
    unscaled = torch.empty(0, 1, device=parts[0].device)
    in_fp8 = tuple(part for part in parts if isinstance(part, Fp8BlockWeight | Fp8TensorWeight))
    if in_fp8:
        fp8 = pack_fp8(in_fp8)
        return Operand(fp8.words, fp8.scales, unscaled, False, *sizes, is_fp8=True)
    dense = [part.dequantize(torch.bfloat16) for part in parts]
    return Operand(dense[0], dense[-1], unscaled, False, *sizes)
