"""Experts by FlashInfer's CuTe DSL kernels, an optional package: NVFP4 on both sides.

`cute_dsl_fused_moe` takes ids and weights that are routed already. Rows come with a scale of their
own each, and what enters the down projection is rounded with one each too. There is one factor for
gate and up, gate's; up's share is made good by the down projection's factor.

For capability 10.0 and 10.3: `flashinfer/fused_moe/cute_dsl/fused_moe.py`,
`@supported_compute_capability([100, 103, 107])`. The kernel of 10.7 knows no scale for each row, as
is said there (`a_per_token_scale_ptr`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tetrad.core.hardware import DeviceSnapshot
from tetrad.formats.e2m1 import E2M1_MAX
from tetrad.formats.weights import E4M3_MAX, HoldsTensors
from tetrad.kernels.backend import Backend
from tetrad.kernels.experts import flashinfer_parts as parts
from tetrad.kernels.experts import reference
from tetrad.kernels.experts.check_w4a4 import rounding
from tetrad.kernels.experts.nvfp4_stacks import NOT_RUN, accepted
from tetrad.kernels.experts.reference import DenseExperts, StoredExperts
from tetrad.kernels.experts.triton_quantize import quantize_rows
from tetrad.kernels.experts.weights import ExpertWeights

CAPABILITIES: parts.Capabilities = ((10, 0), (10, 3))
MULTIPLES = (128, 64)
"""Of D and F: whole tiles of scales, and up and gate in turn by GROUP_ROWS."""
GROUP_ROWS = 64


@dataclass(frozen=True, eq=False)
class CuteDslExperts(HoldsTensors):
    """One layer's experts as the kernel reads them."""

    gate_up: Tensor
    """uint8 [E, 2F, D / 2]: 64 rows of up, 64 of gate, and so on"""
    gate_up_scales: Tensor
    """uint8 [32, 4, 2F / 128, 4, D / 64, E], a view of tiles"""
    gate_up_factor: Tensor
    """float32 [E]: gate's global scale"""
    down: Tensor
    """uint8 [E, D, F / 2]"""
    down_scales: Tensor
    """uint8 [32, 4, D / 128, 4, F / 64, E]"""
    down_factor: Tensor
    """float32 [E]"""
    hidden_scale: Tensor
    """float32 [1]: 1 / (6 * 448), on which the scales of the rounded rows are built"""


Prepared = CuteDslExperts | DenseExperts | StoredExperts


def why_not(device: DeviceSnapshot) -> str | None:
    """None, or why the kernels cannot run on `device`, and what would cure it."""
    return parts.why_not(device, CAPABILITIES, ("flashinfer", "cutlass"))


def prepare(weight: ExpertWeights, dtype: torch.dtype) -> Prepared:
    """Lay out a layer's experts. What is not accepted stays with the plain torch backend."""
    stacks = accepted(weight, dtype, MULTIPLES)
    if stacks is None:
        return reference.prepare(weight, dtype)
    codes, scales = (_in_turn(part) for part in parts.joined(stacks))
    down = stacks.down
    return CuteDslExperts(
        codes,
        _strided(scales),
        stacks.gate.global_scale,
        down.codes,
        _strided(down.scales.view(torch.uint8)),
        down.global_scale * stacks.up_over_gate,
        torch.full((1,), 1 / (E2M1_MAX * E4M3_MAX), device=codes.device),
    )


def _in_turn(rows: Tensor) -> Tensor:
    """[E, 2F, n]: `interleave_cute_dsl_moe_weights`."""
    experts, count, columns = rows.shape
    halves = rows.view(experts, 2, count // (2 * GROUP_ROWS), GROUP_ROWS, columns)
    return halves.transpose(1, 2).reshape(rows.shape)


def _strided(scales: Tensor) -> Tensor:
    """Bytes [E, M, K] in tiles, the axes in the order that the kernel names them."""
    return parts.in_tiles(scales).permute(3, 4, 1, 5, 2, 0)


def run(
    x: Tensor,
    weight: Prepared,
    ids: Tensor,
    slot_weights: Tensor,
    shared: Tensor | None,
    residual: Tensor | None = None,
) -> Tensor:
    """Round the rows, then one call. Slots are summed in order and not with atomics, so that the
    same input gives the same output."""
    if not isinstance(weight, CuteDslExperts):
        return reference.run(x, weight, ids, slot_weights, shared, residual)
    rows = quantize_rows(x.contiguous())
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    parts.load("cute_dsl_fused_moe")(
        x=rows.codes,
        x_sf=rows.scales.view(torch.uint8)[..., None],
        token_selected_experts=ids.int().contiguous(),
        token_final_scales=slot_weights.contiguous(),
        w1_weight=weight.gate_up,
        w1_weight_sf=weight.gate_up_scales,
        w1_alpha=weight.gate_up_factor,
        fc2_input_scale=weight.hidden_scale,
        w2_weight=weight.down,
        w2_weight_sf=weight.down_scales,
        w2_alpha=weight.down_factor,
        num_experts=len(weight.down),
        top_k=ids.shape[1],
        use_fused_finalize=False,
        moe_output=y,
        quant_mode="w4a4",
        per_token_scale=rows.row_scale,
        nvfp4_4over6=None,
    )
    return parts.finished(y, shared, residual)


BACKEND = Backend(
    "flashinfer_cutedsl", run, why_not, prepare, rounding=rounding(None), note=NOT_RUN
)
