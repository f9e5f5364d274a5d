"""The kernel timer: every op, every backend, the shapes of a real model.

Each cell's result is checked on the very inputs that are timed; a wrong one gets no time. What a
time is worth is told by ceilings measured in the same run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from tetrad import __version__
from tetrad.bench.kernels import block as kernels_block
from tetrad.bench.kernels import dense as kernels_dense
from tetrad.bench.kernels.breakdown import breakdown
from tetrad.bench.kernels.ceilings import measure_ceilings
from tetrad.bench.kernels.check import Arguments, Truth, truth_of
from tetrad.core.arch import ModelArch
from tetrad.core.ranks import Ranks
from tetrad.core.records import CallTime, Ceilings, KernelTiming, LaunchTime
from tetrad.kernels.backend import Backend, Op
from tetrad.kernels.canary import told
from tetrad.kernels.contract import Case, num_rows
from tetrad.kernels.device import snapshot
from tetrad.kernels.registry import OPS
from tetrad.kernels.shapes import Load, cases_for, step_tokens
from tetrad.kernels.timer import CudaTimer, Timer, timer_for

CEILINGS_SHARE = 0.1
"""Of the budget, for measuring the ceilings."""
MOST_CEILINGS_S, MOST_CELL_S = 4.0, 1.0
MOST_SETS = 4
COMPARED = "humming"
"""The backend that `compare` runs beside the others."""
PRODUCTS = ("dense", "linear", "router", "experts", "moe_block")
"""Ops whose rate is compared with that of large dense products."""


def op_names() -> tuple[str, ...]:
    """All that can be timed: large dense products first, since others are compared with them."""
    return (kernels_dense.NAME, *OPS, kernels_block.NAME)


@dataclass(frozen=True)
class KernelBench:
    """What to time."""

    ops: tuple[str, ...]
    backends: tuple[str, ...]
    """() for all."""
    arch: ModelArch
    model: str
    ranks: Ranks
    loads: tuple[Load, ...]
    """For every op but the experts."""
    expert_loads: tuple[Load, ...]
    dtype: torch.dtype
    device: torch.device
    budget_s: float
    command: str
    breakdown: bool = False
    """Ask the GPU's profiler for the launches of each call."""
    compare: bool = False
    """Also run Humming where an op has it, before the others."""

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """Op by op, shape by shape. An op whose shapes no model sets comes with its contract's."""
        found = []
        for name in self.ops:
            op = self.op(name)
            if name == kernels_dense.NAME:
                cases = kernels_dense.dense_cases(self.arch, self.dtype, snapshot(self.device))
                found += [Cell(op, case, case["T"]) for case in cases]
                continue
            loads = self.expert_loads if name == "experts" else self.loads
            shapes = [
                Cell(op, case, step_tokens(self.arch, load))
                for load in loads
                for case in self._shapes(name, load)
            ]
            found += shapes or [Cell(op, case, _rows(case)) for case in op.contract.cases]
        return tuple(found)

    def op(self, name: str) -> Op:
        """One of `op_names`."""
        return self._own_ops[name] if name in self._own_ops else OPS[name]

    @cached_property
    def _own_ops(self) -> dict[str, Op]:
        block = kernels_block.block_op(self.arch)
        return {kernels_dense.NAME: kernels_dense.DENSE, kernels_block.NAME: block}

    def _shapes(self, name: str, load: Load) -> Iterable[Case]:
        if name == kernels_block.NAME:
            return kernels_block.block_cases(self.arch, self.ranks, load)
        return cases_for(name, self.arch, self.ranks, load)

    def wanted(self, op: Op) -> list[Backend]:
        """The op's backends that were asked for; the one to compare with comes first. Dense
        products have the device's own, whoever is measured against them."""
        if op is kernels_dense.DENSE:
            return [op.backends["cublas" if self.device.type == "cuda" else "torch"]]
        compared = (COMPARED,) if self.compare else ()
        asked = [
            backend
            for name, backend in op.backends.items()
            if not self.backends or name in (*self.backends, *compared)
        ]
        return sorted(asked, key=lambda backend: backend.name not in compared)


@dataclass(frozen=True)
class Cell:
    """One op at one shape."""

    op: Op
    case: Case
    tokens: int


def _rows(case: Case) -> int:
    values = case.values
    return (
        num_rows(values["lens"]) if "lens" in values else int(values.get("T", values.get("R", 1)))
    )


Tell = Callable[[str], None]


def run(plan: KernelBench, tell: Tell, timer: Timer | None = None) -> Iterator[KernelTiming]:
    """Time every cell, one record per backend, as they come. `tell` hears what happens next."""
    deadline = time.monotonic() + plan.budget_s
    timer = timer or timer_for(plan.device)
    tell("measuring the ceilings of this device")
    budget_s = min(MOST_CEILINGS_S, CEILINGS_SHARE * plan.budget_s)
    ceilings = measure_ceilings(timer, plan.dtype, plan.device, budget_s)
    bench = _Bench(plan, timer, ceilings, datetime.now(UTC).isoformat(timespec="seconds"))
    took_s: dict[str, float] = {}
    for done, cell in enumerate(plan.cells):
        name, began = cell.op.contract.name, time.monotonic()
        left_s = deadline - began
        if left_s <= took_s.get(name, 0.0):
            reason = f"the {plan.budget_s:g} s of --budget-s do not suffice"
            yield from bench.without_time(cell, "skipped", reason)
            continue
        tell(f"{name}, {cell.case.name}, {cell.tokens} tokens ({done + 1} of {len(plan.cells)})")
        yield from bench.measure(cell, min(MOST_CELL_S, left_s / (len(plan.cells) - done)))
        # Inputs, checks and a first call take what they take, most likely as long the next time.
        took_s[name] = time.monotonic() - began


@dataclass(frozen=True)
class _Bench:
    plan: KernelBench
    timer: Timer
    ceilings: Ceilings
    started_at: str
    dense: list[float] = field(default_factory=list)
    """TFLOP/s of dense products so far, in the activations' type."""

    @cached_property
    def device(self) -> Any:
        return snapshot(self.plan.device)

    def measure(self, cell: Cell, budget_s: float) -> Iterator[KernelTiming]:
        """One record per wanted backend."""
        backends = self.plan.wanted(cell.op)
        try:
            sets = self._inputs(cell)
            truth = truth_of(cell.op, sets[0])
        except Exception as error:  # noqa: BLE001  # whatever a device refuses, the rest goes on
            yield from self.without_time(cell, "failed", f"making the inputs: {told(error)}")
            return
        compared_us = None
        for backend in backends:
            row = self._row(cell, backend, **self._try(backend, sets, truth, budget_s))
            if row.time is not None and self.plan.compare:
                if backend.name == COMPARED:
                    compared_us = row.time.median_us
                elif compared_us is not None:
                    row = row.model_copy(update={"over_humming": row.time.median_us / compared_us})
            yield row

    def without_time(self, cell: Cell, status: str, detail: str) -> Iterator[KernelTiming]:
        """The same status for every wanted backend."""
        for backend in self.plan.wanted(cell.op):
            yield self._row(cell, backend, status=status, detail=detail)

    def _inputs(self, cell: Cell) -> list[Arguments]:
        """One set of inputs, or several different ones when the cache would hold one."""
        plan, check = self.plan, cell.op.check
        sets = [check.inputs(cell.case, plan.dtype, plan.device)]
        num_bytes = max(1, sum(_nbytes(value) for value in sets[0].values()))
        for number in range(1, min(MOST_SETS, math.ceil(self.timer.cache_bytes / num_bytes))):
            other = replace(cell.case, name=f"{cell.case.name} #{number}")
            sets.append(check.inputs(other, plan.dtype, plan.device))
        return sets

    def _try(
        self, backend: Backend, sets: list[Arguments], truth: Truth, budget_s: float
    ) -> dict[str, Any]:
        """Fields of a record: status, detail, error, time."""
        if refusal := backend.why_not(self.device):
            return {"status": "refused", "detail": refusal}
        try:
            calls = [self._call(truth.op, backend, arguments) for arguments in sets]
            results = _run_over_poison(truth.op, calls[0], _storages(sets[0]))
            error = truth.error(results)
            if not error <= self._tolerance(truth.op, backend):
                return _wrong(error)
            del results
            time_ = self.timer.time(calls, budget_s / len(self.plan.wanted(truth.op)))
        except Exception as error:  # noqa: BLE001  # a kernel may fail in any way; the row says how
            return {"status": "failed", "detail": told(error)}
        issued = backend.issued_flops
        clocks = _clocks(self.plan.device)
        is_block = truth.op.contract.name == kernels_block.NAME
        launches = self._breakdown(calls[0]) if self.plan.breakdown or is_block else []
        return {
            "status": "ok",
            "error": error,
            "time": time_,
            "clocks": clocks,
            "breakdown": launches,
            "block": kernels_block.block_time(launches, time_.median_us) if is_block else None,
            "issued_flops": issued(calls[0].keywords) if issued else None,
        }

    def _breakdown(self, call: Callable[[], object]) -> list[LaunchTime]:
        if not isinstance(self.timer, CudaTimer):
            return []
        return breakdown(call, self.timer.flush)

    def _call(self, op: Op, backend: Backend, arguments: Arguments) -> partial[Any]:
        if op.contract.changes_an_argument:
            arguments = {
                name: value.clone() if isinstance(value, Tensor) else value
                for name, value in arguments.items()
            }
        if name := op.contract.prepared:
            arguments = arguments | {name: backend.prepare(arguments[name], self.plan.dtype)}
        return partial(backend.run, **arguments)

    def _against_dense(self, cell: Cell, tflops: float) -> dict[str, float]:
        """The plateau so far and the share of it; {} for what is not a product."""
        name = cell.op.contract.name
        if name not in PRODUCTS:
            return {}
        is_plain = cell.case.values.get("format") == str(self.plan.dtype).removeprefix("torch.")
        if name == kernels_dense.NAME and is_plain:
            self.dense.append(tflops)
        plateau = max(self.dense, default=self.ceilings.gemm_tflops)
        return {"plateau_tflops": plateau, "plateau_share": tflops / plateau}

    def _tolerance(self, op: Op, backend: Backend) -> float:
        """Against the op's exact answer."""
        if backend.rounding is not None:
            return backend.rounding.deviation
        return op.contract.tolerance[str(self.plan.dtype).removeprefix("torch.")]

    def _row(
        self, cell: Cell, backend: Backend, *, time: CallTime | None = None, **fields: Any
    ) -> KernelTiming:
        plan, contract, case = self.plan, cell.op.contract, cell.case
        flops = contract.flops(case)
        num_bytes = contract.bytes(case, plan.dtype.itemsize)
        floor_us, bound = self.ceilings.floor_us(flops, num_bytes)
        rates: dict[str, Any] = {}
        if time is not None:
            rates = {
                "tflops": flops / time.median_us / 1e6,
                "tb_per_s": num_bytes / time.median_us / 1e6,
                "share": floor_us / time.median_us,
            }
            rates |= self._against_dense(cell, rates["tflops"])
        return KernelTiming(
            tetrad_version=__version__,
            started_at=self.started_at,
            command=plan.command,
            device=self.device.as_dict(),
            ceilings=self.ceilings,
            model=plan.model,
            ranks=f"tp={plan.ranks.tp},ep={plan.ranks.ep}",
            op=contract.name,
            backend=backend.name,
            case=case.name,
            shape=dict(case.values),
            dtype=str(plan.dtype).removeprefix("torch."),
            tokens=cell.tokens,
            tokens_per_expert=_tokens_per_expert(cell),
            tolerance=self._tolerance(cell.op, backend),
            flops=flops,
            bytes=num_bytes,
            bound=bound,
            time=time,
            **rates,
            **fields,
        )


def _tokens_per_expert(cell: Cell) -> float | None:
    """Slots that other ranks compute are not among them: a block's E is that of all ranks."""
    if cell.op.contract.name not in ("experts", kernels_block.NAME):
        return None
    case = cell.case
    slots = case["T"] * case["K"] * (1.0 - case.values.get("dropped", 0.0))
    return float(slots / case["E"])


def _run_over_poison(op: Op, call: Callable[[], Any], spared: set[int]) -> tuple[Tensor, ...]:
    """The results of a second run, whose memory the first one left full of NaN: what a backend does
    not write shows."""
    if not op.contract.changes_an_argument:
        raw = call()
        for result in raw if isinstance(raw, tuple) else (raw,):
            if result.untyped_storage().data_ptr() not in spared:
                result.fill_(torch.nan if result.is_floating_point() else -7)
        del raw, result
    return op.check.outputs(call())


def _wrong(error: float) -> dict[str, Any]:
    if math.isnan(error):
        return {"status": "wrong", "detail": "a result is not finite, or of another shape"}
    return {"status": "wrong", "error": error, "detail": f"relative error {error:.2g}"}


def _storages(arguments: Arguments) -> set[int]:
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return int(getattr(value, "nbytes", 0))


def _clocks(device: torch.device) -> dict[str, float] | None:
    """Clock, power and temperature of a GPU, where nvidia-ml-py tells them."""
    if device.type != "cuda":
        return None
    try:
        return {
            "sm_mhz": float(torch.cuda.clock_rate(device)),
            "power_w": torch.cuda.power_draw(device) / 1e3,
            "temperature_c": float(torch.cuda.temperature(device)),
        }
    except Exception:  # noqa: BLE001  # each release of the library has errors of its own
        return None


def worst(rows: Iterable[KernelTiming]) -> str:
    """One sentence when some figure must not be used, else ""."""
    rows = list(rows)
    bad = [row for row in rows if row.status in ("wrong", "failed")]
    if rows and all(row.status == "refused" for row in rows):
        refused = {f"{row.op} by {row.backend}: {row.detail}" for row in rows}
        return f"No backend that was asked for can run here: {'; '.join(sorted(refused))}."
    if not bad:
        return ""
    first = bad[0]
    return (
        f"{len(bad)} cell{'s' * (len(bad) > 1)} wrong or failed, first {first.op} by "
        f"{first.backend} at {first.tokens} tokens: {first.detail}."
    )
