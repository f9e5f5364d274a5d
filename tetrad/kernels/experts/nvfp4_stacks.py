"""Experts as tensor cores want them that take four bits on both sides, and which can be that."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from tetrad.formats.weights import NVFP4_BLOCK, Nvfp4Weight
from tetrad.kernels.experts.weights import ExpertWeights

NOT_RUN = "not run on hardware"
"""The note of a backend that nobody has seen run."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Nvfp4Experts:
    """A layer's stacks, all NVFP4, with block scales that are not negative."""

    gate: Nvfp4Weight
    up: Nvfp4Weight
    down: Nvfp4Weight

    @property
    def up_over_gate(self) -> Tensor:
        """float32 [E]: global scales of up over those of gate.

        What has one factor for both halves takes gate's. What follows the activation is then too
        small by this ratio, exactly: it is linear in up.
        """
        gate = self.gate.global_scale
        return torch.where(gate == 0, 1.0, self.up.global_scale / gate)


def accepted(
    weight: ExpertWeights, dtype: torch.dtype, multiples: tuple[int, int]
) -> Nvfp4Experts | None:
    """The stacks where they can be multiplied so: NVFP4, bf16 activations, sizes D and F that are
    `multiples`. Else None, with a warning."""
    gate, up, down = weight.gate, weight.up, weight.down
    hidden, width = down.shape[-2:]
    if dtype != torch.bfloat16:
        reason = f"activations are {str(dtype).removeprefix('torch.')} and not bfloat16"
    elif not (
        isinstance(gate, Nvfp4Weight)
        and isinstance(up, Nvfp4Weight)
        and isinstance(down, Nvfp4Weight)
    ):
        names = "/".join(stack.format_name for stack in (gate, up, down))
        reason = f"weights are {names} and not nvfp4"
    elif hidden % multiples[0] or width % multiples[1]:
        reason = (
            f"experts of {hidden} x {width} are not whole tiles of {multiples[0]} x {multiples[1]}"
        )
    else:
        return Nvfp4Experts(*map(without_signs, (gate, up, down)))
    _tell_once(reason)
    return None


@functools.cache
def _tell_once(reason: str) -> None:
    _log.warning("Experts run on plain torch, many times slower: %s.", reason)


def without_signs(stack: Nvfp4Weight) -> Nvfp4Weight:
    """The same values; a negative block scale gives its sign to its codes, because tensor cores
    read scales as unsigned (`ue4m3`)."""
    raw = stack.scales.view(torch.uint8)
    is_negative = raw >= 0x80
    if not bool(is_negative.any()):
        return stack
    codes = stack.codes.view(*raw.shape, NVFP4_BLOCK // 2)
    flipped = codes ^ (is_negative * 0x88).to(torch.uint8)[..., None]
    scales = (raw & 0x7F).view(torch.float8_e4m3fn)
    return Nvfp4Weight(flipped.view(stack.codes.shape), scales, stack.global_scale)
