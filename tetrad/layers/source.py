"""Where a layer takes its weights from."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tetrad.formats.checkpoint import Checkpoint
from tetrad.formats.weights import DenseWeight, Weight
from tetrad.kernels.experts.weights import ExpertWeights
from tetrad.kernels.select import OpSet


@dataclass(slots=True)
class FormatTotal:
    """What one storage format adds up to."""

    num_tensors: int = 0
    """Matrices and vectors, each with its scales; a stack of E experts counts E."""
    stored_bytes: int = 0
    """In the checkpoint."""
    memory_bytes: int = 0
    """On the device, after what the backends made of them."""


@dataclass
class WeightLedger:
    """Counts every weight as it is loaded, by the format it is stored in."""

    totals: dict[str, FormatTotal] = field(default_factory=dict)

    def add(self, format_name: str, num_tensors: int, stored_bytes: int, memory_bytes: int) -> None:
        """Enter one weight, or one stack of them."""
        total = self.totals.setdefault(format_name, FormatTotal())
        total.num_tensors += num_tensors
        total.stored_bytes += stored_bytes
        total.memory_bytes += memory_bytes


@dataclass(frozen=True)
class WeightSource:
    """A checkpoint seen from one module: names are relative to `prefix`.

    Weights come out as the ops want them, and are entered in the ledger. Every method raises
    CheckpointError when the tensor is missing or has another shape.
    """

    checkpoint: Checkpoint
    ops: OpSet
    dtype: torch.dtype
    """Of activations, and of dense weights in memory."""
    ledger: WeightLedger
    prefix: str = ""

    def at(self, name: str) -> WeightSource:
        """The same checkpoint seen from submodule `name`."""
        return WeightSource(
            self.checkpoint, self.ops, self.dtype, self.ledger, f"{self._full(name)}."
        )

    def vector(self, name: str, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """[width], never quantised, in `dtype` (default: the activations')."""
        return self._dense(name, (width,), dtype or self.dtype)

    def table(self, name: str, rows: int, width: int) -> Tensor:
        """[rows, width], never quantised: an embedding."""
        return self._dense(name, (rows, width), self.dtype)

    def matrix(self, name: str, out: int, width: int) -> Tensor:
        """The values of a linear's weight, decoded once, for arithmetic on the weight itself."""
        stored = self.checkpoint.linear(self._full(name), (out, width))
        values = stored.dequantize(self.dtype)
        self.ledger.add(stored.format_name, 1, stored.nbytes, values.nbytes)
        return values

    def linear(self, name: str, out: int, width: int, dtype: torch.dtype | None = None) -> Weight:
        """A linear's weight, prepared for `ops.linear` with inputs of `dtype`."""
        stored = self.checkpoint.linear(self._full(name), (out, width))
        prepared: Weight = self.ops.linear.prepare(stored, dtype or self.dtype)
        self.ledger.add(stored.format_name, 1, stored.nbytes, prepared.nbytes)
        return prepared

    def experts(self, num_experts: int, hidden: int, intermediate: int) -> object:
        """The experts below this prefix, prepared for `ops.experts`."""
        gate = self._stack("gate_proj", num_experts, intermediate, hidden)
        up = self._stack("up_proj", num_experts, intermediate, hidden)
        down = self._stack("down_proj", num_experts, hidden, intermediate)
        prepared = self.ops.experts.prepare(ExpertWeights(gate, up, down), self.dtype)
        left, stored_left = prepared.nbytes, gate.nbytes + up.nbytes + down.nbytes
        for stack in (gate, up, down):
            share = left * stack.nbytes // stored_left
            self.ledger.add(stack.format_name, num_experts, stack.nbytes, share)
            left, stored_left = left - share, stored_left - stack.nbytes
        return prepared

    def _stack(self, name: str, num_experts: int, out: int, width: int) -> Weight:
        modules = [self._full(f"{expert}.{name}") for expert in range(num_experts)]
        return self.checkpoint.linears(modules, (out, width))

    def _dense(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        stored = self.checkpoint.tensor(self._full(name), shape)
        values = stored.to(dtype)
        self.ledger.add(DenseWeight.format_name, 1, stored.nbytes, values.nbytes)
        return values

    def _full(self, name: str) -> str:
        return f"{self.prefix}{name}"
