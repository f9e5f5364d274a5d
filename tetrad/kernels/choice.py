"""Chooses between backends that give the right numbers: by their time at this model's shapes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tetrad import __version__
from tetrad.core.arch import ModelArch
from tetrad.core.hardware import DeviceSnapshot
from tetrad.core.keys import ACTIVATION, KeyFormat
from tetrad.core.ranks import Ranks
from tetrad.kernels.backend import Backend, Op
from tetrad.kernels.canary import told
from tetrad.kernels.choice_cache import FILE_NAME, ChoiceCache, cache_folder, source_digest
from tetrad.kernels.compare import compare
from tetrad.kernels.contenders import (
    REFERENCE,
    Regime,
    Times,
    contenders,
    decided,
    reason,
    rivals,
    winners,
)
from tetrad.kernels.contract import Case
from tetrad.kernels.shapes import Load, cases_for
from tetrad.kernels.timer import Timer, timer_for

TOKENS = (8, 64, 512, 2048)
"""Steps at which backends are timed, from a few decodes to a chunk of a prompt."""
BUDGET_S = 60.0
CELL_S = 0.05
TOLD_S = 5.0
"""What takes longer is told once it is over."""

Attempt = Callable[[str, str], None]
"""Hears op and backend before the backend is called."""


@dataclass(frozen=True)
class Outcome:
    """What timing an op's backends came to."""

    regimes: tuple[Regime, ...]
    """By rising size; one when the same backend wins everywhere, none when all failed."""
    reason: str
    times_us: Times = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    """Backends that failed at the model's shapes."""


@dataclass(slots=True)
class Found:
    """What is known of an op's backends at the model's shapes."""

    times: Times
    failures: dict[str, str]
    is_lasting: bool = True
    """Would the next start find the same? Not where memory was short."""


def contest_cases(op: Op, arch: ModelArch, keys: KeyFormat = ACTIVATION) -> dict[int, Case]:
    """Tokens of a step → the case at which the op's backends are compared; {} where its shapes do
    not depend on a model."""
    found = {n: cases_for(op.contract.name, arch, Ranks(), Load(n, keys=keys)) for n in TOKENS}
    return {tokens: cases[0] for tokens, cases in found.items() if cases}


def call_of(
    op: Op, backend: Backend, inputs: Mapping[str, Any], dtype: torch.dtype
) -> partial[Any]:
    """The backend on these inputs, with its own layout of what it prepares."""
    arguments = dict(inputs)
    if name := op.contract.prepared:
        arguments[name] = backend.prepare(arguments[name], dtype)
    return partial(backend.run, **arguments)


@dataclass(frozen=True)
class Contest:
    """Times backends for one model on one device."""

    arch: ModelArch
    dtype: torch.dtype
    place: torch.device
    here: DeviceSnapshot
    tell: Callable[[str], None]
    attempt: Attempt = lambda _op, _backend: None
    budget_s: float = BUDGET_S
    spent_s: float = 0.0
    """Of the budget, what compiling has taken before."""
    keys: KeyFormat = ACTIVATION
    """How keys are cached."""

    @cached_property
    def cache(self) -> ChoiceCache:
        """Where times are kept between starts."""
        return ChoiceCache(cache_folder() / FILE_NAME, self.tell)

    @cached_property
    def timer(self) -> Timer:
        return timer_for(self.place)

    @cached_property
    def deadline(self) -> float:
        """The budget begins with the first backend that has to be timed."""
        return time.monotonic() + self.budget_s - self.spent_s

    @cached_property
    def digest(self) -> str:
        return source_digest(Path(__file__).parent)

    def decide(self, op: Op, survivors: Sequence[Backend]) -> Outcome:
        """The fastest of at least two backends, in order of preference."""
        cases = contest_cases(op, self.arch, self.keys)
        first = (Regime(survivors[0].name, None),)
        if not cases:
            return Outcome(first, "the first choice; its shapes do not depend on the model")
        about = self._about(op, survivors, cases)
        found = self._remembered(about, survivors, cases)
        origin = "remembered"
        if _first_open(survivors, cases, found) is not None:
            try:
                if self._measure(op, survivors, cases, found, about):
                    origin = "measured"
            except torch.OutOfMemoryError:
                return Outcome(first, "the first choice; not timed, memory is too small for it")
        return self._outcome(op, survivors, cases, found, origin)

    def close(self) -> None:
        """Give the timer's memory back, and what timing left in torch's cache."""
        self.__dict__.pop("timer", None)
        if self.place.type == "cuda":
            torch.cuda.empty_cache()

    def _outcome(
        self,
        op: Op,
        survivors: Sequence[Backend],
        cases: Mapping[int, Case],
        found: Found,
        origin: str,
    ) -> Outcome:
        left = rivals(survivors, found.failures)
        if not left:
            return Outcome((), "", refusals=found.failures)
        missing = [tokens for tokens in cases if tokens not in decided(left, found.times)]
        late = f"as {self.budget_s:g} s had gone into compiling and timing"
        if len(missing) == len(cases):
            told = f"the first choice; not timed, {late}"
            return Outcome((Regime(left[0].name, None),), told, refusals=found.failures)
        regimes = winners(op, left, found.times)
        told = reason(regimes, found.times, origin)
        if missing:
            told += f"; {' and '.join(map(str, missing))} tokens not timed, {late}"
        return Outcome(regimes, told, found.times, found.failures)

    def _about(
        self, op: Op, survivors: Sequence[Backend], cases: Mapping[int, Case]
    ) -> dict[str, Any]:
        return {
            "op": op.contract.name,
            "backends": [backend.name for backend in survivors],
            "shapes": [dict(case.values) for case in cases.values()],
            "dtype": str(self.dtype),
            "device": self.here.name,
            "versions": self.here.versions | {"tetrad": __version__, "source": self.digest},
        }

    def _remembered(
        self, about: dict[str, Any], survivors: Sequence[Backend], cases: Mapping[int, Case]
    ) -> Found:
        """What the cache has of these backends and sizes."""
        kept = self.cache.get(about)
        names = {backend.name for backend in survivors}
        if kept is None or not names.issuperset([*kept.times_us, *kept.failures]):
            return Found({}, {})
        times = {
            name: {size: us for size, us in each.items() if size in cases}
            for name, each in kept.times_us.items()
        }
        return Found(times, dict(kept.failures))

    def _measure(
        self,
        op: Op,
        survivors: Sequence[Backend],
        cases: Mapping[int, Case],
        found: Found,
        about: dict[str, Any],
    ) -> bool:
        """Fill in what is missing, size by size, as far as the budget goes; was there anything?"""
        began = time.monotonic()
        is_begun = False
        while (tokens := _first_open(survivors, cases, found)) is not None:
            if self.deadline <= time.monotonic():
                break
            if not is_begun:
                names = [backend.name for backend in rivals(survivors, found.failures)]
                self.tell(f"timing {op.contract.name}: {' against '.join(names)}")
                is_begun = True
            self._measure_size(op, survivors, tokens, cases[tokens], found)
            if found.is_lasting:
                self.cache.put(about, found.times, found.failures)
        if time.monotonic() - began >= TOLD_S:
            self.tell(f"timed {op.contract.name} in {time.monotonic() - began:.1f} s")
        return is_begun

    def _measure_size(
        self, op: Op, survivors: Sequence[Backend], tokens: int, case: Case, found: Found
    ) -> None:
        """Time every contender that has no time at this size, or note why it fails."""
        inputs = op.check.inputs(case, self.dtype, self.place)
        truth = self._truth(op, survivors, inputs)
        open_ = [
            backend
            for backend in contenders(rivals(survivors, found.failures), found.times)
            if tokens not in found.times.get(backend.name, {})
        ]
        # Where there is nothing to choose, the call matters and not how long it takes.
        budget_s = CELL_S if len(rivals(survivors, found.failures)) > 1 else 0.0
        for backend in open_:
            self.attempt(op.contract.name, backend.name)
            try:
                took_us = self._time(op, backend, inputs, truth, budget_s)
            except Exception as error:  # noqa: BLE001  # a kernel may fail in any way
                found.times.pop(backend.name, None)
                found.failures[backend.name] = (
                    f"fails at {tokens} tokens of this model: {told(error)}"
                )
                found.is_lasting &= not isinstance(error, torch.OutOfMemoryError)
            else:
                found.times.setdefault(backend.name, {})[tokens] = took_us

    def _truth(
        self, op: Op, survivors: Sequence[Backend], inputs: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        """What plain torch gives, where others can be compared with it; else ()."""
        reference = next((each for each in survivors if each.name == REFERENCE), None)
        if reference is None or not op.contract.is_smooth:
            return ()
        self.attempt(op.contract.name, reference.name)
        return op.check.outputs(call_of(op, reference, inputs, self.dtype)())

    def _time(
        self,
        op: Op,
        backend: Backend,
        inputs: dict[str, Any],
        truth: tuple[Tensor, ...],
        budget_s: float,
    ) -> float:
        """Microseconds. Raises ArithmeticError when the result is not `truth` but for rounding:
        large steps go other ways through a kernel than the canary's small ones."""
        call = call_of(op, backend, inputs, self.dtype)
        if truth:
            allowed = 2 * op.contract.tolerance[str(self.dtype).removeprefix("torch.")]
            for ours, theirs in zip(op.check.outputs(call()), truth, strict=True):
                error = compare(ours, theirs).relative_l2
                if not error <= allowed:
                    raise ArithmeticError(f"{error:.2g} off what torch gives")
        return self.timer.time([call], budget_s).median_us


def _first_open(
    survivors: Sequence[Backend], cases: Mapping[int, Case], found: Found
) -> int | None:
    """The smallest size at which a contender has no time yet."""
    open_ = contenders(rivals(survivors, found.failures), found.times)
    sizes = (n for n in cases if any(n not in found.times.get(each.name, {}) for each in open_))
    return min(sizes, default=None)
