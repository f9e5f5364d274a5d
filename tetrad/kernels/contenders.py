"""What times say: who is worth timing further, who wins, and for which steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from tetrad.kernels.backend import Backend, Op
from tetrad.kernels.ragged import Ragged
from tetrad.kernels.shapes import MOST_SEQUENCES

REFERENCE = "torch"
"""The backend that others are compared with; timed only where it is the last one."""
TOLD_TOKENS = 64
"""The step that reasons speak of."""
NOISE = 0.03
"""A backend must be faster than a preferred one by more than this share."""
SLOW = 2.0
"""One that takes more than this many times as long as another is not timed at further sizes."""
REGIME_OPS = ("experts",)
"""Ops that may have another backend for large steps than for small ones. For others a token's
result would depend on how many are computed beside it, for little gain."""

Times = dict[str, dict[int, float]]
"""Backend → tokens of the step → microseconds."""


PHASE_OPS = ("mla",)
"""Ops that may have another backend for decodes than for steps with prompts."""
Phase = Literal["decode", "prefill"]
PHASES: tuple[Phase, ...] = ("decode", "prefill")
"""A step in which each sequence has one token; any other."""


@dataclass(frozen=True, slots=True)
class Regime:
    """The backend for steps up to a size, or of one phase."""

    backend: str
    up_to_tokens: int | None
    """None: however large."""
    phase: Phase | None = None
    """None: both."""


def backend_in(phase: str, regimes: Iterable[Regime]) -> str | None:
    """What runs steps of `phase`, where regimes tell phases apart."""
    return next((regime.backend for regime in regimes if regime.phase == phase), None)


def asked_for(op: str, forced: Mapping[str, str]) -> dict[Phase, str]:
    """The backend that an op must have in each phase, or "auto"; `forced` as `resolve_ops` has
    it."""
    everywhere = forced.get(op, "auto")
    return {phase: forced.get(f"{op}.{phase}", everywhere) for phase in PHASES}


def phase_of(tokens: int) -> Phase:
    """Of a timed step."""
    return "decode" if tokens <= MOST_SEQUENCES else "prefill"


def rivals(backends: Iterable[Backend], failures: Mapping[str, str]) -> list[Backend]:
    """Those that did not fail, but the reference only where nothing else is left."""
    left = [backend for backend in backends if backend.name not in failures]
    return [backend for backend in left if backend.name != REFERENCE] or left


def contenders(backends: Sequence[Backend], times: Times) -> list[Backend]:
    """Of `backends`, those that none beats by more than SLOW at a size that was timed."""
    timed = [times.get(backend.name, {}) for backend in backends]
    best = {
        size: min(each[size] for each in timed if size in each) for each in timed for size in each
    }
    left = [
        backend
        for backend, mine in zip(backends, timed, strict=True)
        if all(us <= SLOW * best[size] for size, us in mine.items())
    ]
    return left or list(backends)


def decided(backends: Sequence[Backend], times: Times) -> list[int]:
    """Sizes at which all contenders were timed, by rising size."""
    timed = [set(times.get(backend.name, {})) for backend in contenders(backends, times)]
    return sorted(set.intersection(*timed))


def winners(op: Op, backends: Sequence[Backend], times: Times) -> tuple[Regime, ...]:
    """The fastest backend for all steps; for experts also, at each size, the fastest of those that
    lay out weights as that one does. At least one size must be `decided`.

    A size that was not timed belongs to the nearest one that was, by ratio.
    """
    sizes = decided(backends, times)
    overall = _fastest(contenders(backends, times), times, sizes)
    if op.contract.name in PHASE_OPS:
        return _by_phase(contenders(backends, times), times, sizes)
    if op.contract.name not in REGIME_OPS:
        return (Regime(overall, None),)
    (layout,) = (backend.prepare for backend in backends if backend.name == overall)
    alike = [backend for backend in backends if backend.prepare is layout]
    best = [
        _fastest([each for each in alike if size in times.get(each.name, {})], times, [size])
        for size in sizes
    ]
    changes = [i for i in range(len(best) - 1) if best[i] != best[i + 1]]
    regimes = [Regime(best[i], math.isqrt(sizes[i] * sizes[i + 1])) for i in changes]
    return (*regimes, Regime(best[-1], None))


def _by_phase(
    backends: Sequence[Backend], times: Times, sizes: Sequence[int]
) -> tuple[Regime, ...]:
    """The fastest in each phase; in one that was not timed, that of the other."""
    best: dict[Phase, str] = {}
    for phase in PHASES:
        if mine := [size for size in sizes if phase_of(size) == phase]:
            best[phase] = _fastest(backends, times, mine)
    if len(set(best.values())) == 1:
        return (Regime(next(iter(best.values())), None),)
    return tuple(Regime(name, None, phase) for phase, name in best.items())


def _fastest(backends: Sequence[Backend], times: Times, sizes: Sequence[int]) -> str:
    """By the geometric mean over `sizes`; one that is preferred wins unless clearly beaten."""

    def mean(name: str) -> float:
        return math.exp(sum(math.log(times[name][size]) for size in sizes) / len(sizes))

    best = backends[0].name
    for backend in backends[1:]:
        if mean(backend.name) < mean(best) * (1 - NOISE):
            best = backend.name
    return best


def reason(regimes: tuple[Regime, ...], times: Times, origin: str) -> str:
    """Such as "42.1 µs against triton 60.0 µs at 64 tokens, measured"."""
    fitting = (r for r in regimes if r.up_to_tokens is None or r.up_to_tokens >= TOLD_TOKENS)
    mine = next(fitting).backend
    size = TOLD_TOKENS if TOLD_TOKENS in times[mine] else max(times[mine])
    others = [
        f"{name} {each[size]:.1f} µs"
        for name, each in times.items()
        if name != mine and size in each
    ]
    against = f" against {', '.join(others)}" if others else ""
    told = f"{times[mine][size]:.1f} µs{against} at {size} tokens, {origin}{_dropped(mine, times)}"
    if len(regimes) == 1:
        return told
    if regimes[0].phase is not None:
        return f"{', '.join(f'{r.backend} for {r.phase}' for r in regimes)}; {mine}: {told}"
    spans = [
        f"{r.backend} up to {r.up_to_tokens} tokens" if r.up_to_tokens else f"{r.backend} above"
        for r in regimes
    ]
    return f"{', '.join(spans)}; {mine}: {told}"


def _dropped(mine: str, times: Times) -> str:
    """Who was not timed at every size, and why."""
    told = [
        f"{name} not timed above {max(each)} tokens, being more than {SLOW:g} times as slow"
        for name, each in times.items()
        if each and max(each) < max(times[mine])
    ]
    return "".join(f"; {sentence}" for sentence in told)


def by_phase(regimes: Sequence[Regime], backends: Mapping[str, Backend]) -> Backend:
    """One backend out of two: what the host knows of the step decides which runs, so that a
    recorded step holds one of them."""
    decode, prefill = (backends[str(backend_in(phase, regimes))] for phase in PHASES)

    def run(queries: Tensor, pool: Tensor, ragged: Ragged, *args: Any, **kwargs: Any) -> Any:
        backend = decode if ragged.is_decode else prefill
        return backend.run(queries, pool, ragged, *args, **kwargs)

    return Backend(f"{decode.name}+{prefill.name}", run, decode.why_not, decode.prepare)


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
