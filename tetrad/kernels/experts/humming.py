"""Experts by Humming, an optional package: NVFP4 weights, bf16 activations, from Ampere on.

Its grouped product takes rows that lie sorted by expert, so rows are gathered before and scattered
back after; activation and sum over slots are ours. Gate and up go through one product where their
global scales agree; Humming has one such scale for each expert's matrix, so otherwise through two.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tetrad.core.hardware import DeviceSnapshot
from tetrad.formats.weights import Nvfp4Weight
from tetrad.kernels import triton_support
from tetrad.kernels.activation.triton import run as gated
from tetrad.kernels.backend import Backend
from tetrad.kernels.experts import reference
from tetrad.kernels.experts.reference import DenseExperts, StoredExperts
from tetrad.kernels.experts.weights import ExpertWeights
from tetrad.kernels.reduce_experts.triton import run as reduce_experts

LAYER_OPTIONS: dict[str, Any] = {
    "weight_config": {"quant_method": "modelopt", "quant_algo": "nvfp4"},
    "pad_n_to_multiple": 256,
    "pad_k_to_multiple": 128,
    "torch_dtype": torch.bfloat16,
}
"""Of a `HummingLayer`. It pads matrices to whole tiles; real models' sizes are whole already."""
COMPUTE_OPTIONS = {"gemm_type": "grouped_contiguous"}


@dataclass(frozen=True, eq=False)
class HummingExperts:
    """One layer's experts in Humming's layout."""

    gate_up: tuple[Any, ...]
    """One `HummingLayer` for both, [E, 2F, D]; or one each."""
    down: Any
    num_experts: int

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        layers = (*self.gate_up, self.down)
        return sum(part.nbytes for layer in layers for part in layer.parameters())

    def hidden(self, rows: Tensor, starts: Tensor) -> Tensor:
        """[n, D] rows sorted by expert to [n, F]."""
        products = [_product(layer, rows, starts) for layer in self.gate_up]
        gate, up = products if len(products) == 2 else products[0].chunk(2, dim=-1)
        return gated(gate, up)


Prepared = HummingExperts | DenseExperts | StoredExperts


def why_not(device: DeviceSnapshot) -> str | None:
    """None, or why Humming cannot run on `device`, and what would cure it."""
    if (reason := triton_support.why_not(device)) is not None:
        return reason
    if importlib.util.find_spec("humming") is None:
        return "the package is not installed; `pip install humming-kernels` installs it"
    return None


def prepare(weight: ExpertWeights, dtype: torch.dtype) -> Prepared:
    """Convert NVFP4 experts. Others, and other activations, stay with the plain torch backend."""
    gate, up, down = weight.gate, weight.up, weight.down
    if dtype != torch.bfloat16 or not (
        isinstance(gate, Nvfp4Weight)
        and isinstance(up, Nvfp4Weight)
        and isinstance(down, Nvfp4Weight)
    ):
        return reference.prepare(weight, dtype)
    can_join = torch.equal(gate.global_scale, up.global_scale)
    parts = (_join(gate, up),) if can_join else (gate, up)
    return HummingExperts(tuple(map(_layer, parts)), _layer(down), weight.num_experts)


def _join(gate: Nvfp4Weight, up: Nvfp4Weight) -> Nvfp4Weight:
    """Gate rows first."""
    scales = torch.cat([part.scales.view(torch.uint8) for part in (gate, up)], dim=1)
    return Nvfp4Weight(
        torch.cat([gate.codes, up.codes], dim=1),
        scales.view(torch.float8_e4m3fn),
        gate.global_scale,
    )


def _layer(stack: Nvfp4Weight) -> Any:
    """A `HummingLayer` that holds `stack` [E, out, in], transformed."""
    num_experts, out, width = stack.shape
    with stack.device:
        layer = importlib.import_module("humming.layer").HummingLayer(
            shape_n=out, shape_k=width, num_experts=num_experts, **LAYER_OPTIONS
        )
    layer.load_from_tensors(
        {
            "weight": stack.codes,
            "weight_scale": stack.scales,
            "weight_scale_2": stack.global_scale,
        }
    )
    layer.transform(allow_inplace=True)
    return layer


def _product(layer: Any, rows: Tensor, starts: Tensor) -> Tensor:
    product: Tensor = layer.forward(
        inputs=rows, expert_layout=starts, compute_config=dict(COMPUTE_OPTIONS)
    )
    return product


def run(
    x: Tensor,
    weight: Prepared,
    ids: Tensor,
    slot_weights: Tensor,
    shared: Tensor | None,
    residual: Tensor | None = None,
) -> Tensor:
    """Rows of dropped slots sort behind the last expert, where no product reads or writes."""
    if not isinstance(weight, HummingExperts):
        return reference.run(x, weight, ids, slot_weights, shared, residual)
    flat = ids.flatten()
    found, order = flat.where(flat >= 0, weight.num_experts).sort(stable=True)
    experts = torch.arange(weight.num_experts + 1, device=ids.device)
    starts = torch.searchsorted(found, experts)
    rows = x.index_select(0, order // ids.shape[1])
    done = _product(weight.down, weight.hidden(rows, starts), starts)
    by_slot = torch.empty_like(done).index_copy_(0, order, done)
    return reduce_experts(by_slot, ids, slot_weights, shared, residual)


BACKEND = Backend("humming", run, why_not, prepare)
