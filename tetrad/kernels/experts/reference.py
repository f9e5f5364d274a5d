"""Routed experts in plain torch: rows sorted by expert, one small MLP per expert that has any."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tetrad.formats.weights import DenseWeight, HoldsTensors, Weight
from tetrad.kernels.backend import Backend
from tetrad.kernels.experts.weights import ExpertWeights


@dataclass(frozen=True, eq=False)
class DenseExperts:
    """Decoded experts: gate and up joined, one view per expert."""

    gate_up: tuple[Tensor, ...]
    """E times [2F, D], gate rows first."""
    down: tuple[Tensor, ...]
    """E times [D, F]."""

    @property
    def num_experts(self) -> int:
        return len(self.down)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(part.nbytes for part in (*self.gate_up, *self.down))

    def apply(self, expert: int, rows: Tensor) -> Tensor:
        """One expert's MLP. [n, D] to [n, D]."""
        gate, up = functional.linear(rows, self.gate_up[expert]).float().chunk(2, dim=-1)
        hidden = (functional.silu(gate) * up).to(rows.dtype)
        return functional.linear(hidden, self.down[expert])


@dataclass(frozen=True, eq=False)
class StoredExperts(HoldsTensors):
    """Experts as stored, decoded to fp32 one at a time when used."""

    stored: ExpertWeights

    @property
    def num_experts(self) -> int:
        return self.stored.num_experts

    def apply(self, expert: int, rows: Tensor) -> Tensor:
        """One expert's MLP. [n, D] to fp32 [n, D]."""
        rows = rows.float()
        gate = functional.linear(rows, _decode(self.stored.gate, expert))
        up = functional.linear(rows, _decode(self.stored.up, expert))
        return functional.linear(functional.silu(gate) * up, _decode(self.stored.down, expert))


def _decode(weight: Weight, expert: int) -> Tensor:
    """One matrix of a stack in fp32."""
    parts = {name: tensor[expert] for name, tensor in weight.tensors().items()}
    return type(weight)(**parts).dequantize(torch.float32)


def prepare(weight: ExpertWeights, dtype: torch.dtype) -> DenseExperts | StoredExperts:
    """Decode once on a CPU, which has no small formats (docs/decisions/002); else keep."""
    stacks = (weight.gate, weight.up, weight.down)
    on_cpu = weight.gate.device.type == "cpu"
    if not on_cpu and not all(isinstance(stack, DenseWeight) for stack in stacks):
        return StoredExperts(weight)
    gate, up, down = (stack.dequantize(dtype) for stack in stacks)
    return DenseExperts(torch.cat([gate, up], dim=1).unbind(), down.unbind())


def run(
    x: Tensor,
    weight: DenseExperts | StoredExperts,
    ids: Tensor,
    slot_weights: Tensor,
    shared: Tensor | None,
    residual: Tensor | None = None,
) -> Tensor:
    """Each (token, slot) row is computed once; the sum over slots runs in slot order in fp32."""
    num_tokens, num_slots = ids.shape
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    rows = x.index_select(0, order // num_slots)
    done = torch.zeros_like(rows, dtype=torch.float32)
    num_dropped, *counts = (flat + 1).bincount(minlength=weight.num_experts + 1).tolist()
    start = num_dropped
    for expert, count in enumerate(counts):
        if count:
            done[start : start + count] = weight.apply(expert, rows[start : start + count])
            start += count
    by_slot = torch.empty_like(done).index_copy_(0, order, done).view(num_tokens, num_slots, -1)
    total = by_slot[:, 0] * slot_weights[:, :1]
    for slot in range(1, num_slots):
        total.addcmul_(by_slot[:, slot], slot_weights[:, slot : slot + 1])
    for added in (shared, residual):
        if added is not None:
            total += added
    return total.to(x.dtype)


BACKEND = Backend("torch", run, prepare=prepare)
