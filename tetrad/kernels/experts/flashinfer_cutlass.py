"""Experts by FlashInfer's CUTLASS kernels, an optional package: NVFP4 on both sides.

`cutlass_fused_moe` takes ids and weights that are routed already, and rounds rows by itself: both
times with a global scale that is set at load. It is for more GPUs than the other two.

For capability 10.0, 10.3, 10.7, 11.0, 12.0 and 12.1: `flashinfer/fused_moe/api.py`,
`_CUTLASS_NVFP4_ARCHS`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tetrad.core.hardware import DeviceSnapshot
from tetrad.formats.weights import HoldsTensors
from tetrad.kernels.backend import Backend
from tetrad.kernels.experts import flashinfer_parts as parts
from tetrad.kernels.experts import reference
from tetrad.kernels.experts.check_w4a4 import rounding
from tetrad.kernels.experts.nvfp4_stacks import NOT_RUN, accepted
from tetrad.kernels.experts.reference import DenseExperts, StoredExperts
from tetrad.kernels.experts.weights import ExpertWeights

CAPABILITIES: parts.Capabilities = ((10, 0), (10, 3), (10, 7), (11, 0), (12, 0), (12, 1))
MULTIPLES = (128, 64)
"""Of D and F: whole tiles of scales (`QuantParams::FP4` in
`flashinfer_cutlass_fused_moe_binding.cu`)."""
ROW_SCALE = 0.125
"""The global scale of all rows. Block scales keep their precision while the largest value of a
block is between 0.012 and 336: a row of a normalised layer, and what its experts make of it, fits.
Smaller blocks lose precision and vanish below 0.0004; larger ones are cut off. The kernel has no
scale for each row; a scale taken from the step would make a token depend on its neighbours."""


@dataclass(frozen=True, eq=False)
class CutlassExperts(HoldsTensors):
    """One layer's experts as the kernel reads them."""

    gate_up: Tensor
    """int64 [E, 2F, D / 16], 16 codes each: the kernel is chosen by this type"""
    gate_up_scales: Tensor
    """int32 [E, 2F, D / 64], tiles of block scales"""
    gate_up_factor: Tensor
    """float32 [E]: gate's global scale times ROW_SCALE"""
    down: Tensor
    """int64 [E, D, F / 16]"""
    down_scales: Tensor
    """int32 [E, D, F / 64]"""
    down_factor: Tensor
    """float32 [E]: down's global scale times ROW_SCALE"""
    row_multiplier: Tensor
    """float32 []: 1 / ROW_SCALE"""
    hidden_multiplier: Tensor
    """float32 [E]: up over gate, over ROW_SCALE. Up went through gate's factor; so what is rounded
    is back at its worth."""

    @property
    def quant_scales(self) -> list[Tensor]:
        """In the order of the kernel's argument."""
        return [
            self.row_multiplier,
            self.gate_up_scales,
            self.gate_up_factor,
            self.hidden_multiplier,
            self.down_scales,
            self.down_factor,
        ]


Prepared = CutlassExperts | DenseExperts | StoredExperts


def why_not(device: DeviceSnapshot) -> str | None:
    """None, or why the kernels cannot run on `device`, and what would cure it."""
    return parts.why_not(device, CAPABILITIES, ("flashinfer",))


def prepare(weight: ExpertWeights, dtype: torch.dtype) -> Prepared:
    """Lay out a layer's experts. What is not accepted stays with the plain torch backend."""
    stacks = accepted(weight, dtype, MULTIPLES)
    if stacks is None:
        return reference.prepare(weight, dtype)
    codes, scales = parts.joined(stacks)
    down = stacks.down
    return CutlassExperts(
        codes.view(torch.int64),
        _words(scales),
        stacks.gate.global_scale * ROW_SCALE,
        down.codes.view(torch.int64),
        _words(down.scales.view(torch.uint8)),
        down.global_scale * ROW_SCALE,
        torch.tensor(1 / ROW_SCALE, device=codes.device),
        stacks.up_over_gate / ROW_SCALE,
    )


def _words(scales: Tensor) -> Tensor:
    return parts.in_rows(parts.in_tiles(scales)).view(torch.int32)


def run(
    x: Tensor,
    weight: Prepared,
    ids: Tensor,
    slot_weights: Tensor,
    shared: Tensor | None,
    residual: Tensor | None = None,
) -> Tensor:
    """One call. Slots are summed in order and not with atomics, so that the same input gives the
    same output."""
    if not isinstance(weight, CutlassExperts):
        return reference.run(x, weight, ids, slot_weights, shared, residual)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    parts.load("cutlass_fused_moe")(
        input=x.contiguous(),
        token_selected_experts=ids.int().contiguous(),
        token_final_scales=slot_weights.contiguous(),
        fc1_expert_weights=weight.gate_up,
        fc2_expert_weights=weight.down,
        output_dtype=x.dtype,
        quant_scales=weight.quant_scales,
        output=y,
        use_fused_finalize=False,
        nvfp4_4over6=None,
    )
    return parts.finished(y, shared, residual)


BACKEND = Backend(
    "flashinfer_cutlass", run, why_not, prepare, rounding=rounding(ROW_SCALE), note=NOT_RUN
)
