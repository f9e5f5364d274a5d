"""Experts by FlashInfer's kernels from TensorRT-LLM, an optional package: NVFP4 on both sides.

`trtllm_fp4_block_scale_routed_moe` takes ids and weights that are routed already. Rows come with a
scale of their own each, and the kernel rounds what enters the down projection with one each too
(`trtllm_fused_moe_kernel_launcher.cu`, `per_token_scales`). Gate and up have a factor each:
silu(gate * output1_scale_gate_scalar) * (up * output1_scale_scalar).

For capability 10.0, 10.3 and 10.7: `flashinfer/fused_moe/runners.py`, `TrtllmFp4RoutedRunner`.
"""

from __future__ import annotations

import importlib
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
from tetrad.kernels.experts.triton_quantize import quantize_rows
from tetrad.kernels.experts.weights import ExpertWeights

CAPABILITIES: parts.Capabilities = ((10, 0), (10, 3), (10, 7))
MULTIPLES = (256, 128)
"""Of D and F: `pad_trtllm_moe_weights` in `flashinfer/fused_moe/core.py`."""
SHUFFLED_ROWS = 32
"""Rows within which the kernel's epilogue wants another order."""
ROUTING_METHOD = 1
"""`RoutingMethodType.Renormalize`. Routing is done; this only has to be a method that the kernel
knows."""


@dataclass(frozen=True, eq=False)
class TrtllmExperts(HoldsTensors):
    """One layer's experts as the kernel reads them."""

    gate_up: Tensor
    """uint8 [E, 2F, D / 2], rows in the kernel's order"""
    gate_up_scales: Tensor
    """float8_e4m3fn [E, 2F, D / 16], rows in the kernel's order, then in tiles"""
    down: Tensor
    """uint8 [E, D, F / 2]"""
    down_scales: Tensor
    """float8_e4m3fn [E, D, F / 16]"""
    gate_factor: Tensor
    """float32 [E], as the other two"""
    up_factor: Tensor
    down_factor: Tensor


Prepared = TrtllmExperts | DenseExperts | StoredExperts


def why_not(device: DeviceSnapshot) -> str | None:
    """None, or why the kernels cannot run on `device`, and what would cure it."""
    return parts.why_not(device, CAPABILITIES, ("flashinfer",))


def prepare(weight: ExpertWeights, dtype: torch.dtype) -> Prepared:
    """Lay out a layer's experts. What is not accepted stays with the plain torch backend."""
    stacks = accepted(weight, dtype, MULTIPLES)
    if stacks is None:
        return reference.prepare(weight, dtype)
    codes, scales = (_shuffled(_alternating(part)) for part in parts.joined(stacks))
    down_codes = _shuffled(stacks.down.codes)
    down_scales = _shuffled(stacks.down.scales.view(torch.uint8))
    return TrtllmExperts(
        codes,
        _tiled(scales),
        down_codes,
        _tiled(down_scales),
        stacks.gate.global_scale,
        stacks.up.global_scale,
        stacks.down.global_scale,
    )


def _alternating(rows: Tensor) -> Tensor:
    """[E, 2F, n]: up's first row, gate's first, up's second: `reorder_rows_for_gated_act_gemm`."""
    up, gate = rows.chunk(2, dim=1)
    return torch.stack([up, gate], dim=2).flatten(1, 2)


def _shuffled(rows: Tensor) -> Tensor:
    """[E, M, n]: row 8 * b + a of each 32 is row 4 * a + b: `get_shuffle_matrix_a_row_indices`."""
    experts, count, columns = rows.shape
    blocks = rows.view(experts, count // SHUFFLED_ROWS, 8, 4, columns)
    return blocks.transpose(2, 3).reshape(rows.shape)


def _tiled(scales: Tensor) -> Tensor:
    return parts.in_rows(parts.in_tiles(scales)).view(torch.float8_e4m3fn)


def run(
    x: Tensor,
    weight: Prepared,
    ids: Tensor,
    slot_weights: Tensor,
    shared: Tensor | None,
    residual: Tensor | None = None,
) -> Tensor:
    """Round the rows, then one call."""
    if not isinstance(weight, TrtllmExperts):
        return reference.run(x, weight, ids, slot_weights, shared, residual)
    num_experts, _, half_width = weight.down.shape
    rows = quantize_rows(x.contiguous())
    enums = importlib.import_module("flashinfer.tllm_enums")
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    parts.load("trtllm_fp4_block_scale_routed_moe")(
        topk_ids=(ids.int().contiguous(), slot_weights.contiguous()),
        routing_bias=None,
        hidden_states=rows.codes,
        hidden_states_scale=rows.scales,
        gemm1_weights=weight.gate_up,
        gemm1_weights_scale=weight.gate_up_scales,
        gemm1_bias=None,
        gemm1_alpha=None,
        gemm1_beta=None,
        gemm1_clamp_limit=None,
        gemm2_weights=weight.down,
        gemm2_weights_scale=weight.down_scales,
        gemm2_bias=None,
        output1_scale_scalar=weight.up_factor,
        output1_scale_gate_scalar=weight.gate_factor,
        output2_scale_scalar=weight.down_factor,
        num_experts=num_experts,
        top_k=ids.shape[1],
        n_group=None,
        topk_group=None,
        intermediate_size=2 * half_width,
        local_expert_offset=0,
        local_num_experts=num_experts,
        routed_scaling_factor=None,
        routing_method_type=ROUTING_METHOD,
        per_token_scale=rows.row_scale,
        output=y,
        hidden_states_scale_layout=enums.SfLayout.layout_linear,
        nvfp4_4over6=None,
    )
    return parts.finished(y, shared, residual)


BACKEND = Backend("flashinfer_trtllm", run, why_not, prepare, rounding=rounding(None), note=NOT_RUN)
