"""Every op of the house, with its backends in order of preference.

A folder below `kernels/` is an op if and only if it is listed here; a test compares both.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from tetrad.kernels.absorb import check as absorb_check
from tetrad.kernels.absorb import contract as absorb
from tetrad.kernels.absorb import cublas as absorb_cublas
from tetrad.kernels.absorb import reference as absorb_torch
from tetrad.kernels.absorb import triton as absorb_triton
from tetrad.kernels.activation import check as activation_check
from tetrad.kernels.activation import contract as activation
from tetrad.kernels.activation import reference as activation_torch
from tetrad.kernels.activation import triton as activation_triton
from tetrad.kernels.add_rms_norm import check as add_rms_norm_check
from tetrad.kernels.add_rms_norm import contract as add_rms_norm
from tetrad.kernels.add_rms_norm import layer_norm as add_rms_norm_layer_norm
from tetrad.kernels.add_rms_norm import reference as add_rms_norm_torch
from tetrad.kernels.add_rms_norm import triton as add_rms_norm_triton
from tetrad.kernels.backend import Backend, Op
from tetrad.kernels.experts import check as experts_check
from tetrad.kernels.experts import contract as experts
from tetrad.kernels.experts import flashinfer_cutedsl as experts_flashinfer_cutedsl
from tetrad.kernels.experts import flashinfer_cutlass as experts_flashinfer_cutlass
from tetrad.kernels.experts import flashinfer_trtllm as experts_flashinfer_trtllm
from tetrad.kernels.experts import gluon as experts_gluon
from tetrad.kernels.experts import humming as experts_humming
from tetrad.kernels.experts import reference as experts_torch
from tetrad.kernels.experts import triton as experts_triton
from tetrad.kernels.experts import triton_fp4 as experts_triton_fp4
from tetrad.kernels.finite_rows import check as finite_rows_check
from tetrad.kernels.finite_rows import contract as finite_rows
from tetrad.kernels.finite_rows import reference as finite_rows_torch
from tetrad.kernels.finite_rows import total as finite_rows_total
from tetrad.kernels.finite_rows import triton as finite_rows_triton
from tetrad.kernels.gqa import check as gqa_check
from tetrad.kernels.gqa import contract as gqa
from tetrad.kernels.gqa import reference as gqa_torch
from tetrad.kernels.gqa import sdpa as gqa_sdpa
from tetrad.kernels.head_linear import check as head_linear_check
from tetrad.kernels.head_linear import contract as head_linear
from tetrad.kernels.head_linear import cublas as head_linear_cublas
from tetrad.kernels.head_linear import reference as head_linear_torch
from tetrad.kernels.head_linear import triton as head_linear_triton
from tetrad.kernels.index_score import check as index_score_check
from tetrad.kernels.index_score import contract as index_score
from tetrad.kernels.index_score import reference as index_score_torch
from tetrad.kernels.index_score import triton as index_score_triton
from tetrad.kernels.index_select import check as index_select_check
from tetrad.kernels.index_select import contract as index_select
from tetrad.kernels.index_select import reference as index_select_torch
from tetrad.kernels.index_select import triton as index_select_triton
from tetrad.kernels.latents import check as latents_check
from tetrad.kernels.latents import contract as latents
from tetrad.kernels.latents import reference as latents_torch
from tetrad.kernels.latents import triton as latents_triton
from tetrad.kernels.linear import check as linear_check
from tetrad.kernels.linear import contract as linear
from tetrad.kernels.linear import onednn as linear_onednn
from tetrad.kernels.linear import reference as linear_torch
from tetrad.kernels.linear import triton as linear_triton
from tetrad.kernels.mla import check as mla_check
from tetrad.kernels.mla import contract as mla
from tetrad.kernels.mla import flashinfer_sparse_mla as mla_flashinfer_sparse_mla
from tetrad.kernels.mla import gluon as mla_gluon
from tetrad.kernels.mla import reference as mla_torch
from tetrad.kernels.mla import triton as mla_triton
from tetrad.kernels.qkv import check as qkv_check
from tetrad.kernels.qkv import contract as qkv
from tetrad.kernels.qkv import reference as qkv_torch
from tetrad.kernels.reduce_experts import check as reduce_experts_check
from tetrad.kernels.reduce_experts import contract as reduce_experts
from tetrad.kernels.reduce_experts import reference as reduce_experts_torch
from tetrad.kernels.reduce_experts import triton as reduce_experts_triton
from tetrad.kernels.rms_norm import check as rms_norm_check
from tetrad.kernels.rms_norm import contract as rms_norm
from tetrad.kernels.rms_norm import layer_norm as rms_norm_layer_norm
from tetrad.kernels.rms_norm import reference as rms_norm_torch
from tetrad.kernels.rms_norm import triton as rms_norm_triton
from tetrad.kernels.rope import check as rope_check
from tetrad.kernels.rope import contract as rope
from tetrad.kernels.rope import reference as rope_torch
from tetrad.kernels.rope import triton as rope_triton
from tetrad.kernels.route import check as route_check
from tetrad.kernels.route import contract as route
from tetrad.kernels.route import reference as route_torch
from tetrad.kernels.route import triton as route_triton
from tetrad.kernels.route_activate import check as route_activate_check
from tetrad.kernels.route_activate import contract as route_activate
from tetrad.kernels.route_activate import reference as route_activate_torch
from tetrad.kernels.route_activate import triton as route_activate_triton
from tetrad.kernels.router import check as router_check
from tetrad.kernels.router import contract as router
from tetrad.kernels.router import cublas as router_cublas
from tetrad.kernels.router import reference as router_torch
from tetrad.kernels.router import triton as router_triton
from tetrad.kernels.sample import candidates as sample_candidates
from tetrad.kernels.sample import check as sample_check
from tetrad.kernels.sample import contract as sample
from tetrad.kernels.sample import reference as sample_torch
from tetrad.kernels.sample import triton as sample_triton
from tetrad.kernels.sort_tokens import check as sort_tokens_check
from tetrad.kernels.sort_tokens import contract as sort_tokens
from tetrad.kernels.sort_tokens import reference as sort_tokens_torch
from tetrad.kernels.sort_tokens import triton as sort_tokens_triton


def _op(contract: ModuleType, check: ModuleType, *backends: ModuleType) -> Op:
    found: list[Backend] = [module.BACKEND for module in backends]
    return Op(contract.CONTRACT, check.CHECK, {backend.name: backend for backend in found})


OPS: Mapping[str, Op] = {
    op.contract.name: op
    for op in (
        _op(rms_norm, rms_norm_check, rms_norm_triton, rms_norm_layer_norm, rms_norm_torch),
        _op(
            add_rms_norm,
            add_rms_norm_check,
            add_rms_norm_triton,
            add_rms_norm_layer_norm,
            add_rms_norm_torch,
        ),
        _op(latents, latents_check, latents_triton, latents_torch),
        _op(rope, rope_check, rope_triton, rope_torch),
        _op(
            head_linear,
            head_linear_check,
            head_linear_triton,
            head_linear_cublas,
            head_linear_torch,
        ),
        _op(absorb, absorb_check, absorb_triton, absorb_cublas, absorb_torch),
        _op(linear, linear_check, linear_triton, linear_onednn, linear_torch),
        _op(activation, activation_check, activation_triton, activation_torch),
        _op(router, router_check, router_triton, router_cublas, router_torch),
        _op(route, route_check, route_triton, route_torch),
        _op(route_activate, route_activate_check, route_activate_triton, route_activate_torch),
        _op(sort_tokens, sort_tokens_check, sort_tokens_triton, sort_tokens_torch),
        _op(
            experts,
            experts_check,
            experts_gluon,
            experts_triton,
            experts_humming,
            experts_flashinfer_trtllm,
            experts_flashinfer_cutedsl,
            experts_flashinfer_cutlass,
            experts_triton_fp4,
            experts_torch,
        ),
        _op(reduce_experts, reduce_experts_check, reduce_experts_triton, reduce_experts_torch),
        _op(index_score, index_score_check, index_score_triton, index_score_torch),
        _op(index_select, index_select_check, index_select_triton, index_select_torch),
        _op(mla, mla_check, mla_gluon, mla_triton, mla_flashinfer_sparse_mla, mla_torch),
        _op(qkv, qkv_check, qkv_torch),
        _op(gqa, gqa_check, gqa_sdpa, gqa_torch),
        _op(
            finite_rows, finite_rows_check, finite_rows_triton, finite_rows_total, finite_rows_torch
        ),
        _op(sample, sample_check, sample_triton, sample_candidates, sample_torch),
    )
}
