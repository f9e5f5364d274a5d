"""Where a layer takes its weights from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from tetrad.distributed.collectives import Collectives, Solo
from tetrad.formats.weights import DenseWeight, Weight
from tetrad.kernels.backend import Backend
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


class StoredWeights(Protocol):
    """What a layer asks of a `Checkpoint`."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor that is never quantised."""
        ...

    def linear(self, module: str, shape: tuple[int, int]) -> Weight:
        """A linear's weight [out, in]."""
        ...

    def linears(self, modules: Sequence[str], shape: tuple[int, int]) -> Weight:
        """Several of them, stacked."""
        ...


@dataclass(frozen=True)
class WeightSource:
    """A checkpoint seen from one module: names are relative to `prefix`.

    Weights come out as the ops want them, and are entered in the ledger. Every method raises
    CheckpointError when the tensor is missing or has another shape.
    """

    checkpoint: StoredWeights
    ops: OpSet
    dtype: torch.dtype
    """Of activations, and of dense weights in memory."""
    ledger: WeightLedger
    prefix: str = ""
    others: Collectives = field(default_factory=Solo)
    """The ranks that hold the rest of the model."""

    def at(self, name: str) -> WeightSource:
        """The same checkpoint seen from submodule `name`."""
        return replace(self, prefix=f"{self._full(name)}.")

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
        return self.prepared([self.stored(name, out, width)], self.ops.linear, dtype)

    def stored(self, name: str, out: int, width: int) -> Weight:
        """A linear's weight as the checkpoint has it; `prepared` makes it ready for an op."""
        return self.checkpoint.linear(self._full(name), (out, width))

    def can_join(self, weights: Sequence[Weight]) -> bool:
        """May `prepared` make one matrix of them? If all are dense and of one type, which that of
        the activations holds: none is to be decoded or rounded for its neighbours' sake."""
        (kind, *others) = {w.data.dtype if isinstance(w, DenseWeight) else None for w in weights}
        return kind is not None and not others and self.dtype in (kind, torch.float32)

    def prepared(
        self, weights: Sequence[Weight], op: Backend, dtype: torch.dtype | None = None
    ) -> Weight:
        """One weight, or several that `can_join` as one above the other, prepared for `op` with
        inputs of `dtype` (default: the activations')."""
        whole = weights[0]
        if len(weights) > 1:
            whole = DenseWeight(torch.cat([part.tensors()["data"] for part in weights]))
        return self.stack_prepared(whole, weights, op, dtype)

    def stack_prepared(
        self, whole: Weight, parts: Sequence[Weight], op: Backend, dtype: torch.dtype | None = None
    ) -> Weight:
        """`whole`, made of `parts` one above the other, prepared for `op` with inputs of `dtype`
        (default: the activations')."""
        prepared: Weight = op.prepare(whole, dtype or self.dtype)
        for part in parts:
            share = prepared.nbytes * part.shape[0] // whole.shape[0]
            self.ledger.add(part.format_name, 1, part.nbytes, share)
        return prepared

    def experts(self, held: range, num_routed: int, hidden: int, intermediate: int) -> object:
        """Some of the `num_routed` experts below this prefix, prepared for `ops.experts`."""
        num_experts = len(held)
        gate = self._stack("gate_proj", held, intermediate, hidden)
        up = self._stack("up_proj", held, intermediate, hidden)
        down = self._stack("down_proj", held, hidden, intermediate)
        prepared = self.ops.experts.prepare(ExpertWeights(gate, up, down, num_routed), self.dtype)
        left, stored_left = prepared.nbytes, gate.nbytes + up.nbytes + down.nbytes
        for stack in (gate, up, down):
            share = left * stack.nbytes // stored_left
            self.ledger.add(stack.format_name, num_experts, stack.nbytes, share)
            left, stored_left = left - share, stored_left - stack.nbytes
        return prepared

    def _stack(self, name: str, held: range, out: int, width: int) -> Weight:
        modules = [self._full(f"{expert}.{name}") for expert in held]
        return self.checkpoint.linears(modules, (out, width))

    def _dense(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        stored = self.checkpoint.tensor(self._full(name), shape)
        values = stored.to(dtype)
        self.ledger.add(DenseWeight.format_name, 1, stored.nbytes, values.nbytes)
        return values

    def _full(self, name: str) -> str:
        return f"{self.prefix}{name}"
