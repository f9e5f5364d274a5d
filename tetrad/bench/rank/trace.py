"""How long each op of each part of a model takes within a step.

The step runs without a graph, and whenever another op or part begins or ends, a mark is set. On a
GPU the mark is a kernel that nothing else launches, and the profiler's list of launches is cut at
the marks: so a launch belongs to what ran between the marks around it, whatever the profiler knows
of where it came from, and gaps between launches count nowhere. On a CPU the mark is the time.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tetrad.bench.kernels.breakdown import launches
from tetrad.kernels.backend import Backend
from tetrad.kernels.select import OP_NAMES, OpSet
from tetrad.layers.mlp import Mlp
from tetrad.models.base import Model

RUNS = 3
MARK = "erfinv"
"""In the name of the marking kernel: no model needs the inverse of the error function."""
OTHER = "other"
"""Stands for an op's name where a part computes without one."""
REST = "model"
"""The part that is none of the others: norms and sums between them, embedding, sampling."""

Label = tuple[str, str]
"""Part and op."""
Seen = tuple[str, float]
"""Name and microseconds of a launch."""


@dataclass
class Spent:
    """What one label took in one step."""

    us: float = 0.0
    launches: int = 0
    calls: int = 0


@dataclass
class Trace:
    """Watches ops and parts while a run is on; costs nothing otherwise."""

    device: torch.device
    is_on: bool = False
    _labels: list[Label] = field(default_factory=list)
    """Of each stretch between two marks."""
    _times_us: list[float] = field(default_factory=list)
    _calls: Counter[Label] = field(default_factory=Counter)
    _part: str = REST
    _op: str = OTHER

    def __post_init__(self) -> None:
        self._number = torch.zeros(1, device=self.device)

    def wrapped(self, ops: OpSet) -> OpSet:
        """The same ops, seen by this trace."""
        watched: dict[str, Any] = {name: self._wrap(name, getattr(ops, name)) for name in OP_NAMES}
        return replace(ops, **watched)

    def watch(self, model: Model) -> None:
        """See the parts of `model`."""
        for layer in model.layers:
            if layer.attention.indexer is not None:
                self._cover(layer.attention, "indexer", "indexer")
            self._cover(layer, "attention", "attention")
            self._cover(layer, "mlp", "dense" if isinstance(layer.mlp, Mlp) else "moe")
        self._cover(model, "output", "head")

    def measure(self, step: Callable[[], object]) -> dict[Label, Spent] | None:
        """Label → the median over some steps; None where launches could not be told apart."""
        found = [self._once(step) for _ in range(RUNS)]
        whole = [each for each in found if each is not None]
        if len(whole) < RUNS:
            return None
        return {
            label: replace(spent, us=statistics.median(each[label].us for each in whole))
            for label, spent in whole[0].items()
        }

    def _once(self, step: Callable[[], object]) -> dict[Label, Spent] | None:
        self._labels, self._times_us, self._calls = [], [], Counter()
        if self.device.type == "cpu":
            self._run(step)
            times = self._times_us
            pieces = [[("", after - before)] for before, after in itertools.pairwise(times)]
            found = spent(self._labels, pieces)
        else:
            seen = launches(lambda: self._run(step))
            found = spent(self._labels, stretches([(name, us) for _, name, us in seen]))
        if found is not None:
            for label, number in self._calls.items():
                found[label].calls = number
        return found

    def _run(self, step: Callable[[], object]) -> None:
        self.is_on = True
        try:
            self._mark()
            step()
        finally:
            self.is_on = False
        self._set_mark()

    def _mark(self) -> None:
        """A stretch with the present label begins."""
        self._set_mark()
        self._labels.append((self._part, self._op))

    def _set_mark(self) -> None:
        if self.device.type == "cpu":
            self._times_us.append(time.perf_counter() * 1e6)
        else:
            torch.erfinv(self._number, out=self._number)

    @contextmanager
    def _inside(self, part: str, op: str) -> Iterator[None]:
        before = self._part, self._op
        self._part, self._op = part, op
        self._mark()
        try:
            yield
        finally:
            self._part, self._op = before
            self._mark()

    def _wrap(self, name: str, backend: Backend) -> Backend:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on:
                return backend.run(*args, **kwargs)
            self._calls[self._part, name] += 1
            with self._inside(self._part, name):
                return backend.run(*args, **kwargs)

        return replace(backend, run=run)

    def _cover(self, owner: object, attribute: str, part: str) -> None:
        called: Callable[..., Any] = getattr(owner, attribute)

        def watched(*args: Any) -> Any:
            if not self.is_on:
                return called(*args)
            with self._inside(part, OTHER):
                return called(*args)

        setattr(owner, attribute, watched)


def stretches(seen: Sequence[Seen]) -> list[list[Seen]]:
    """The launches between each two marks, in order; what lies before the first or after the last
    belongs to nobody."""
    found: list[list[Seen]] = []
    for name, us in seen:
        if MARK in name:
            found.append([])
        elif found:
            found[-1].append((name, us))
    return found[:-1]


def spent(labels: Sequence[Label], pieces: Sequence[Sequence[Seen]]) -> dict[Label, Spent] | None:
    """Added up by label; None where a mark is missing, since every launch after it would be
    somebody else's."""
    if len(labels) != len(pieces):
        return None
    found: dict[Label, Spent] = {}
    for label, piece in zip(labels, pieces, strict=True):
        total = found.setdefault(label, Spent())
        total.us += sum(us for _, us in piece)
        total.launches += sum(name != "" for name, _ in piece)
    return found
