"""Is a cell's result right? Asked of the very inputs that are timed.

A real model's step is too large for the op's float64 check, which works row by row in Python. So
that check sees a few rows, cut out of the inputs by the axis letters of the contract, and only the
experts and output columns these rows need. Where all results are activations, all rows are compared
with the plain torch backend too, fed with the inputs in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tetrad.formats.weights import FP8_BLOCK, Fp8BlockWeight, Weight
from tetrad.kernels.backend import Op
from tetrad.kernels.compare import compare
from tetrad.kernels.draw import rows_of
from tetrad.kernels.experts.weights import ExpertWeights
from tetrad.kernels.ragged import Ragged

Arguments = dict[str, Any]
Results = tuple[Tensor, ...]

ROW_LETTERS = ("T", "R")
CHECKED_NUMBERS = 50_000
"""About how many input numbers the float64 check may read; more would take it seconds."""
MOST_ROWS, FEWEST_ROWS = 16, 2
MOST_EXPERT_SLOTS = 8
"""Slots, so experts, that the checked rows may have together."""


@dataclass(frozen=True)
class Truth:
    """What the results of one cell must be."""

    op: Op
    rows: Tensor | None
    """Checked rows, or None: all of them, the op is not one of rows."""
    exact: Results
    """float64 on the CPU, of the checked rows."""
    narrow: Callable[[Results], Results]
    """Cuts of a row's results what was not checked."""
    whole: Results | None
    """fp32 results of the torch backend for all rows, or None when they cannot be compared."""

    def error(self, results: Results) -> float:
        """The largest relative L2 error found; NaN when something is not finite or missing."""
        rows = self.rows
        cut = results if rows is None else tuple(r[rows.to(r.device)] for r in results)
        pairs = list(zip(self.narrow(cut), self.exact, strict=True))
        if self.whole is not None:
            pairs += zip(results, self.whole, strict=True)
        errors = [compare(_fit(ours, truth), truth).relative_l2 for ours, truth in pairs]
        return math.nan if any(map(math.isnan, errors)) else max(errors)


def _fit(ours: Tensor, truth: Tensor) -> Tensor:
    """Without trailing columns that no checked row uses (keys that only later rows see)."""
    if ours.ndim == truth.ndim == 2 and ours.shape[1] > truth.shape[1]:
        surplus = ours[:, truth.shape[1] :]
        if bool(surplus.isneginf().all()):
            return ours[:, : truth.shape[1]]
    return ours


def truth_of(op: Op, arguments: Arguments) -> Truth:
    """Compute what `arguments` must give. Leaves them as they are."""
    whole = _whole(op, arguments)
    kinds = _row_arguments(op)
    if not kinds:
        return Truth(op, None, op.check.expected(arguments), lambda results: results, whole)
    rows = _choose_rows(
        [arguments[name] for name, kind in kinds.items() if kind == "row"], arguments
    )
    subset = arguments | {
        name: None if arguments[name] is None else _TAKE[kind](arguments[name], rows)
        for name, kind in kinds.items()
    }
    subset, narrow = _NARROW.get(op.contract.name, _no_narrowing)(subset)
    return Truth(op, rows, op.check.expected(subset), narrow, whole)


def _row_arguments(op: Op) -> dict[str, str]:
    """Arguments that must be cut with the rows of the results, each with the way to do it; {} for
    an op that is not one of rows."""
    letters = {_leading(result.shape) for result in op.contract.results}
    if len(letters) != 1 or not letters <= set(ROW_LETTERS):
        return {}
    (letter,) = letters
    ways = {letter: "row", f"{letter} * K": "slots"}
    found = {a.name: ways.get(_leading(a.shape), "") for a in op.contract.arguments}
    found |= {a.name: "ragged" for a in op.contract.arguments if a.dtype == "Ragged"}
    return {name: kind for name, kind in found.items() if kind}


def _leading(shape: str) -> str:
    return shape.removeprefix("[").split(",")[0].rstrip("]")


def _choose_rows(tensors: list[Tensor | None], arguments: Arguments) -> Tensor:
    """First, last and evenly between; fewer when rows are wide or choose many experts."""
    given = [tensor for tensor in tensors if tensor is not None]
    num_rows = len(given[0])
    numbers = max(tensor[0].numel() for tensor in given)
    most = max(FEWEST_ROWS, min(MOST_ROWS, CHECKED_NUMBERS // numbers))
    if "weight" in arguments and "ids" in arguments:
        most = max(1, min(most, MOST_EXPERT_SLOTS // arguments["ids"].shape[1]))
    return torch.linspace(0, num_rows - 1, min(most, num_rows)).round().long()


def _take_rows(value: Tensor, rows: Tensor) -> Tensor:
    return value[rows.to(value.device)]


def _take_slots(value: Tensor, rows: Tensor) -> Tensor:
    """Of [T * K, ...] all K of some T."""
    num_tokens = int(rows[-1]) + 1
    return _take_rows(value.view(num_tokens, -1, *value.shape[1:]), rows).flatten(0, 1)


def _take_ragged(ragged: Ragged, rows: Tensor) -> Ragged:
    """Each row as a sequence of its own that ends with the row's last key."""
    found = rows_of(ragged)
    chosen = [found[row] for row in rows.tolist()]
    device = ragged.page_table.device
    kv_lens = tuple(seen for _, _, seen in chosen)
    sequences = torch.tensor([sequence for _, sequence, _ in chosen], device=device)
    return Ragged(
        query_start=torch.arange(len(chosen) + 1, device=device, dtype=torch.int32),
        kv_lens=torch.tensor(kv_lens, device=device, dtype=torch.int32),
        page_table=ragged.page_table[sequences],
        query_lens=(1,) * len(chosen),
        kv_lens_host=kv_lens,
    )


_TAKE: Mapping[str, Callable[[Any, Tensor], Any]] = {
    "row": _take_rows,
    "slots": _take_slots,
    "ragged": _take_ragged,
}


Narrowing = tuple[Arguments, Callable[[Results], Results]]


def _no_narrowing(arguments: Arguments) -> Narrowing:
    return arguments, lambda results: results


def _experts_of_rows(arguments: Arguments) -> Narrowing:
    """Only the experts that the rows choose, renumbered."""
    ids: Tensor = arguments["ids"]
    used: Tensor = torch.unique(ids[ids >= 0])
    new_ids = torch.searchsorted(used, ids.clamp(min=0)).where(ids >= 0, ids)
    stored: ExpertWeights = arguments["weight"]
    gate, up, down = (_pick(stack, used) for stack in (stored.gate, stored.up, stored.down))
    weight = ExpertWeights(gate, up, down, stored.num_routed)
    return arguments | {"ids": new_ids, "weight": weight}, lambda results: results


def _some_columns(arguments: Arguments) -> Narrowing:
    """Only the first and the last whole block of output columns."""
    weight: Weight = arguments["weight"]
    num_blocks = weight.shape[0] // FP8_BLOCK
    if num_blocks < 2:
        return _no_narrowing(arguments)
    blocks = torch.tensor([0, num_blocks - 1], device=weight.device)
    columns = (
        blocks[:, None] * FP8_BLOCK + torch.arange(FP8_BLOCK, device=blocks.device)
    ).flatten()
    grid = {"scale_inv": blocks} if isinstance(weight, Fp8BlockWeight) else {}
    parts = {
        name: _pick_rows(part, grid.get(name, columns)) if part.ndim else part
        for name, part in weight.tensors().items()
    }
    narrowed = arguments | {"weight": type(weight)(**parts)}
    return narrowed, lambda results: tuple(r[:, columns.to(r.device)] for r in results)


def _pick(stack: Weight, which: Tensor) -> Weight:
    parts = {name: _pick_rows(tensor, which) for name, tensor in stack.tensors().items()}
    return type(stack)(**parts)


def _pick_rows(part: Tensor, which: Tensor) -> Tensor:
    """Along the first axis; as bytes, since not every device can index small floats."""
    if part.element_size() == 1:
        return part.view(torch.uint8)[which].view(part.dtype)
    return part[which]


_NARROW: Mapping[str, Callable[[Arguments], Narrowing]] = {
    "experts": _experts_of_rows,
    "linear": _some_columns,
}


def _whole(op: Op, arguments: Arguments) -> Results | None:
    """The torch backend on all rows in fp32."""
    if not op.contract.is_smooth:
        return None
    wide = {name: _widen(op, name, value) for name, value in arguments.items()}
    reference = op.backends["torch"]
    if name := op.contract.prepared:
        wide[name] = reference.prepare(arguments[name], torch.float32)
    return op.check.outputs(reference.run(**wide))


def _widen(op: Op, name: str, value: Any) -> Any:
    (argument,) = (a for a in op.contract.arguments if a.name == name)
    return value.float() if argument.dtype == "activation" and value is not None else value
