"""Chooses between backends that give the right numbers: by their time at this model's shapes."""

from __future__ import annotations

import math
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
from tetrad.core.ranks import Ranks
from tetrad.kernels.backend import Backend, Op
from tetrad.kernels.canary import told
from tetrad.kernels.choice_cache import FILE_NAME, ChoiceCache, cache_folder, source_digest
from tetrad.kernels.compare import compare
from tetrad.kernels.contract import Case
from tetrad.kernels.shapes import Load, cases_for
from tetrad.kernels.timer import Timer, timer_for

TOKENS = (8, 64, 512, 2048)
"""Steps at which backends are timed, from a few decodes to a chunk of a prompt."""
TOLD_TOKENS = 64
"""The step that reasons speak of."""
NOISE = 0.03
"""A backend must be faster than a preferred one by more than this share."""
BUDGET_S = 60.0
CELL_S = 0.05
REGIME_OPS = ("experts",)
"""Ops that may have another backend for large steps than for small ones. For others a token's
result would depend on how many are computed beside it, for little gain."""

Attempt = Callable[[str, str], None]
"""Hears op and backend before the backend is called."""
Times = dict[str, dict[int, float]]
"""Backend → tokens of the step → microseconds."""


@dataclass(frozen=True, slots=True)
class Regime:
    """The backend for steps up to a size."""

    backend: str
    up_to_tokens: int | None
    """None: however large."""


@dataclass(frozen=True)
class Outcome:
    """What timing an op's backends came to."""

    regimes: tuple[Regime, ...]
    """By rising size; one when the same backend wins everywhere, none when all failed."""
    reason: str
    times_us: Times = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    """Backends that failed at the model's shapes."""


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
        return time.monotonic() + self.budget_s

    @cached_property
    def digest(self) -> str:
        return source_digest(Path(__file__).parent)

    def decide(self, op: Op, survivors: Sequence[Backend]) -> Outcome:
        """The fastest of at least two backends, in order of preference."""
        cases = self._cases(op)
        first = (Regime(survivors[0].name, None),)
        if not cases:
            return Outcome(first, "the first choice; its shapes do not depend on the model")
        about = self._about(op, survivors, cases)
        times = self._remembered(about, survivors, cases)
        origin = "remembered"
        failures: dict[str, str] = {}
        if times is None:
            if time.monotonic() >= self.deadline:
                reason = f"the first choice; not timed, as {self.budget_s:g} s had gone into others"
                return Outcome(first, reason)
            origin = "measured"
            try:
                times, failures = self._measure(op, survivors, cases)
            except torch.OutOfMemoryError:
                return Outcome(first, "the first choice; not timed, memory is too small for it")
            if not failures:
                self.cache.put(about, times)
        complete = [backend for backend in survivors if backend.name not in failures]
        if not complete:
            return Outcome((), "", refusals=failures)
        regimes = winners(op, complete, times)
        return Outcome(regimes, _reason(regimes, times, origin), times, failures)

    def close(self) -> None:
        """Give the timer's memory back, and what timing left in torch's cache."""
        self.__dict__.pop("timer", None)
        if self.place.type == "cuda":
            torch.cuda.empty_cache()

    def _cases(self, op: Op) -> dict[int, Case]:
        found = {n: cases_for(op.contract.name, self.arch, Ranks(), Load(n)) for n in TOKENS}
        return {tokens: cases[0] for tokens, cases in found.items() if cases}

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
    ) -> Times | None:
        """What the cache has, unless somebody took a part of it away."""
        times = self.cache.get(about)
        wanted = {(backend.name, tokens) for backend in survivors for tokens in cases}
        if times is None or {(name, n) for name, each in times.items() for n in each} != wanted:
            return None
        return times

    def _measure(
        self, op: Op, survivors: Sequence[Backend], cases: Mapping[int, Case]
    ) -> tuple[Times, dict[str, str]]:
        """Times, and why a backend has none."""
        names = " against ".join(backend.name for backend in survivors)
        self.tell(f"timing {op.contract.name}: {names}")
        times: Times = {backend.name: {} for backend in survivors}
        failures: dict[str, str] = {}
        for tokens, case in cases.items():
            inputs = op.check.inputs(case, self.dtype, self.place)
            truth = self._truth(op, survivors, inputs)
            for backend in survivors:
                if backend.name in failures:
                    continue
                self.attempt(op.contract.name, backend.name)
                try:
                    times[backend.name][tokens] = self._time(op, backend, inputs, truth)
                except Exception as error:  # noqa: BLE001  # a kernel may fail in any way
                    del times[backend.name]
                    failures[backend.name] = (
                        f"fails at {tokens} tokens of this model: {told(error)}"
                    )
        return times, failures

    def _truth(
        self, op: Op, survivors: Sequence[Backend], inputs: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        """What plain torch gives, where others can be compared with it; else ()."""
        reference = next((each for each in survivors if each.name == "torch"), None)
        if reference is None or not op.contract.is_smooth:
            return ()
        self.attempt(op.contract.name, reference.name)
        return op.check.outputs(self._call(op, reference, inputs)())

    def _call(self, op: Op, backend: Backend, inputs: dict[str, Any]) -> partial[Any]:
        if name := op.contract.prepared:
            inputs = inputs | {name: backend.prepare(inputs[name], self.dtype)}
        return partial(backend.run, **inputs)

    def _time(
        self, op: Op, backend: Backend, inputs: dict[str, Any], truth: tuple[Tensor, ...]
    ) -> float:
        """Microseconds. Raises ArithmeticError when the result is not `truth` but for rounding:
        large steps go other ways through a kernel than the canary's small ones."""
        call = self._call(op, backend, inputs)
        if truth:
            allowed = 2 * op.contract.tolerance[str(self.dtype).removeprefix("torch.")]
            for ours, theirs in zip(op.check.outputs(call()), truth, strict=True):
                error = compare(ours, theirs).relative_l2
                if not error <= allowed:
                    raise ArithmeticError(f"{error:.2g} off what torch gives")
        return self.timer.time([call], CELL_S).median_us


def winners(op: Op, backends: Sequence[Backend], times: Times) -> tuple[Regime, ...]:
    """The fastest backend for all steps; for experts also, at each size, the fastest of those that
    lay out weights as that one does.

    A size that was not timed belongs to the nearest one that was, by ratio.
    """
    sizes = sorted(times[backends[0].name])
    overall = _fastest(backends, times, sizes)
    if op.contract.name not in REGIME_OPS:
        return (Regime(overall, None),)
    (layout,) = (backend.prepare for backend in backends if backend.name == overall)
    alike = [backend for backend in backends if backend.prepare is layout]
    best = [_fastest(alike, times, [size]) for size in sizes]
    changes = [i for i in range(len(best) - 1) if best[i] != best[i + 1]]
    regimes = [Regime(best[i], math.isqrt(sizes[i] * sizes[i + 1])) for i in changes]
    return (*regimes, Regime(best[-1], None))


def _fastest(backends: Sequence[Backend], times: Times, sizes: Sequence[int]) -> str:
    """By the geometric mean over `sizes`; one that is preferred wins unless clearly beaten."""

    def mean(name: str) -> float:
        return math.exp(sum(math.log(times[name][size]) for size in sizes) / len(sizes))

    best = backends[0].name
    for backend in backends[1:]:
        if mean(backend.name) < mean(best) * (1 - NOISE):
            best = backend.name
    return best


def _reason(regimes: tuple[Regime, ...], times: Times, origin: str) -> str:
    """Such as "42.1 µs against torch 310.0 µs at 64 tokens, measured"."""
    fitting = (r for r in regimes if r.up_to_tokens is None or r.up_to_tokens >= TOLD_TOKENS)
    mine = next(fitting).backend
    others = [f"{name} {each[TOLD_TOKENS]:.1f} µs" for name, each in times.items() if name != mine]
    against = f" against {', '.join(others)}" if others else ""
    told = f"{times[mine][TOLD_TOKENS]:.1f} µs{against} at {TOLD_TOKENS} tokens, {origin}"
    if len(regimes) == 1:
        return told
    spans = [
        f"{r.backend} up to {r.up_to_tokens} tokens" if r.up_to_tokens else f"{r.backend} above"
        for r in regimes
    ]
    return f"{', '.join(spans)}; {mine}: {told}"


def by_rows(regimes: Sequence[Regime], backends: Mapping[str, Backend]) -> Backend:
    """One backend out of several that share a weight layout: the step's rows decide which runs."""
    steps = [(regime.up_to_tokens, backends[regime.backend]) for regime in regimes]
    last = steps[-1][1]

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        for up_to_tokens, backend in steps:
            if up_to_tokens is None or len(x) <= up_to_tokens:
                return backend.run(x, *args, **kwargs)
        raise AssertionError("the last regime has no limit")

    name = "+".join(dict.fromkeys(regime.backend for regime in regimes))
    return Backend(name, run, last.why_not, last.prepare)
