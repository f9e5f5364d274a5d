"""What happens when logits are not finite: find the faulty op and replace its backend.

The sampler marks rows whose logits contain NaN or infinity; that costs nothing, because the mark
travels with the sampled token. The step is then recomputed and the result of every op checked. The
first op with a result that is not finite, from inputs that all are, is at fault. If another backend
gives finite numbers for the same arguments and passes its canary, it takes over permanently.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tetrad.core.plan import StepPlan
from tetrad.core.step import PAGE_TOKENS
from tetrad.engine.runner import Runner
from tetrad.kernels.backend import Backend, Op
from tetrad.kernels.contract import Argument
from tetrad.kernels.registry import OPS
from tetrad.kernels.switch import Switch
from tetrad.models.base import Model

_log = logging.getLogger(__name__)

NOT_JUDGED = ("index_score", "index_select", "sort_tokens", "sample")
"""Ops that give integers, or whose results rightly hold numbers that are not finite."""

MOST_PASSING = 2
"""Faults that do not happen again before recorded steps are no longer trusted."""
MOST_LISTED = 4

Refusal = Callable[[Op, Backend], str | None]
"""Why a backend cannot be used here, canary included; None if it can."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An op that makes numbers that are not finite of numbers that are."""

    layer: int | None
    """None: outside the layers."""
    op: str
    backend: str
    successor: str | None
    """The backend that took over; None: no other can."""

    def __str__(self) -> str:
        place = "outside the layers" if self.layer is None else f"layer {self.layer}"
        found = f"{place}, op {self.op}: backend {self.backend} made them of finite numbers"
        if self.successor is None:
            return f"{found}, and no other backend can take over"
        return f"{found}; {self.successor}, which passes its canary, takes over"


class NanGuard:
    """Watches one runner. `refusal` judges backends that could take over."""

    def __init__(
        self, runner: Runner, model: Model, switches: dict[str, Switch], refusal: Refusal
    ) -> None:
        self._runner = runner
        self._model = model
        self._switches = switches
        self._refusal = refusal
        self._num_passing = 0

    def cure(self, plan: StepPlan, rids: Collection[str]) -> bool:
        """The logits of `rids` in `plan`, whose tokens are all known, were not finite. Is there
        hope that these requests go well if they are computed again? Logs one line."""
        watch = _Watch(_rows_of(plan, rids), self._others)
        with self._watched(watch):
            logits = self._runner.compute(plan)
        if watch.fault is not None:
            is_curable, found = watch.fault.successor is not None, str(watch.fault)
        elif _is_finite(logits[watch.rows.samples]):
            is_curable, found = True, self._passing()
        else:
            is_curable, found = False, "no op alone is at fault"
        end = "these requests are computed again" if is_curable else "these requests fail"
        _log.warning("Logits of %s were not finite; %s; %s.", _listed(rids), found, end)
        if watch.fault is not None and is_curable:
            self._runner.renew_graphs()
        return is_curable

    def _passing(self) -> str:
        """What does not happen without a graph may happen in graphs alone: after some time of that
        steps run without."""
        self._num_passing += 1
        if self._runner.graphs is None or self._num_passing < MOST_PASSING:
            return "it did not happen again"
        self._runner.graphs = None
        return f"it did not happen again, {MOST_PASSING} times by now; steps run without graphs"

    def _others(self, switch: Switch) -> Iterator[Backend]:
        """Backends that could stand behind a switch, in order of preference: those that can run
        here, round nowhere else and read weights as they lie in memory."""
        op, now = OPS[switch.op], switch.backend
        for backend in op.backends.values():
            is_alike = backend.prepare is now.prepare and backend.rounding is None
            if backend.name != now.name and is_alike and self._refusal(op, backend) is None:
                yield backend

    @contextmanager
    def _watched(self, watch: _Watch) -> Iterator[None]:
        layers = list(self._model.layers)
        for switch in self._switches.values():
            switch.watch = watch
        self._model.layers[:] = [
            _WatchedLayer(layer, watch, i)
            for i, layer in enumerate(layers, self._model.arch.first_layer)
        ]
        try:
            yield
        finally:
            self._model.layers[:] = layers
            for switch in self._switches.values():
                switch.watch = None


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a step that somebody's logits depend on."""

    num_tokens: int
    tokens: list[int]
    num_samples: int
    samples: list[int]

    def of(self, values: Tensor) -> Tensor:
        """Those of a result with a row a token, or a row a sample; else all."""
        if len(values) == self.num_tokens:
            return values[self.tokens]
        return values[self.samples] if len(values) == self.num_samples else values


def _rows_of(plan: StepPlan, rids: Collection[str]) -> _Rows:
    tokens: list[int] = []
    samples: list[int] = []
    num_tokens = num_samples = 0
    for work in plan.sequences:
        if work.rid in rids:
            tokens += range(num_tokens, num_tokens + len(work.token_ids))
            samples.append(num_samples)
        num_tokens += len(work.token_ids)
        num_samples += work.sample is not None
    return _Rows(num_tokens, tokens, num_samples, samples)


class _Watch:
    """Runs ops; at the first fault it switches to another backend that does better."""

    def __init__(self, rows: _Rows, others: Callable[[Switch], Iterator[Backend]]) -> None:
        self.rows = rows
        self.layer: int | None = None
        self.fault: Fault | None = None
        self._others = others

    def __call__(self, switch: Switch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        faulty = switch.backend
        result = faulty.run(*args, **kwargs)
        if self.fault is not None or switch.op in NOT_JUDGED:
            return result
        inputs = _inputs(OPS[switch.op], args)
        if self._is_sound(switch, args, result) or not all(map(self._is_finite, inputs)):
            return result
        successor = None
        for backend in self._others(switch):
            other = backend.run(*args, **kwargs)
            if self._is_sound(switch, args, other):
                switch.backend, successor, result = backend, backend.name, other
                break
        self.fault = Fault(self.layer, switch.op, faulty.name, successor)
        return result

    def _is_sound(self, switch: Switch, args: tuple[Any, ...], result: Any) -> bool:
        return all(map(self._is_finite, _results(OPS[switch.op], args, result)))

    def _is_finite(self, values: Tensor) -> bool:
        return _is_finite(self.rows.of(values))


class _WatchedLayer:
    """A layer that tells which one it is."""

    def __init__(self, layer: Callable[..., Any], watch: _Watch, number: int) -> None:
        self._layer, self._watch, self._number = layer, watch, number

    def __call__(self, *args: Any) -> Any:
        self._watch.layer = self._number
        result = self._layer(*args)
        self._watch.layer = None
        return result


def _listed(rids: Collection[str]) -> str:
    names = sorted(rids)
    more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return ", ".join(names[:MOST_LISTED]) + more


def _inputs(op: Op, args: tuple[Any, ...]) -> list[Tensor]:
    """What a step reads of the cache is judged by what it gives: most of a pool is not ours."""
    pairs = zip(op.contract.arguments, args, strict=False)
    return _floats([value for argument, value in pairs if not _is_pool(argument)])


def _results(op: Op, args: tuple[Any, ...], result: Any) -> list[Tensor]:
    """Of a pool the slots that were written, FP8 keys decoded."""
    named = dict(zip((argument.name for argument in op.contract.arguments), args, strict=False))
    pairs = list(zip(op.contract.results, op.check.outputs(result), strict=True))
    if not any(_is_pool(promise) and len(found) for promise, found in pairs):
        return _floats([found for _, found in pairs])
    pages, page = torch.unique(named["slots"] // PAGE_TOKENS, return_inverse=True)
    slots = page * PAGE_TOKENS + named["slots"] % PAGE_TOKENS
    cut = [found[pages] if _is_pool(each) and len(found) else found for each, found in pairs]
    values = op.check.values(named, tuple(cut))
    return _floats(
        [
            found.flatten(0, 1)[slots.to(found.device)] if _is_pool(each) and len(found) else found
            for (each, _), found in zip(pairs, values, strict=True)
        ]
    )


def _is_pool(argument: Argument) -> bool:
    return argument.shape.startswith("[P,")


def _floats(values: Sequence[Any]) -> list[Tensor]:
    return [v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.dim()]


def _is_finite(values: Tensor) -> bool:
    return bool(torch.isfinite(values).all())
