"""Tries backends in processes of their own, before the process that serves calls any.

A canary tells wrong numbers. A kernel that reads where it must not, or never ends, takes its
process with it; here that is one which has nothing to lose. First every backend that comes into
question is called once, at its canary's cases and at the model's shapes, in several processes side
by side, because compiling takes the time. Then one process alone times them. What a process was
busy with when it was lost is left out, and another goes on with the rest. Outcomes are kept, so
that later starts try nothing; the compilers keep what they compiled, so that later calls are quick.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from tetrad import __version__
from tetrad.core.arch import ModelArch
from tetrad.core.keys import ACTIVATION, KeyFormat
from tetrad.kernels.backend import Backend, Op
from tetrad.kernels.choice import BUDGET_S, TOLD_S, contest_cases
from tetrad.kernels.choice_cache import FILE_NAME, ChoiceCache, cache_folder, source_digest
from tetrad.kernels.contenders import REFERENCE, asked_for
from tetrad.kernels.contract import Case
from tetrad.kernels.device import snapshot
from tetrad.kernels.registry import OPS
from tetrad.kernels.trial_pool import PATIENCE_S, Pool, Tried, Unit, num_processes, room_on
from tetrad.kernels.trial_process import COMMAND, Answer, LostError, Process

COMPILE_S = 40.0
"""Of the contest's budget, for first calls at the model's shapes: none is begun later."""
CONTEXT_BYTES = 1 << 30
"""Device memory of a process that holds nothing."""
COPIES = 3
"""How often a call's bytes are in memory: as stored, as prepared, and on the way there."""

Pair = tuple[str, str]
"""Op and backend."""
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be chosen: see `select.resolve_ops`."""

    device: str
    dtype: torch.dtype
    forced: Mapping[str, str] = field(default_factory=dict)
    arch: ModelArch | None = None
    keys: KeyFormat = ACTIVATION
    """How keys are cached."""
    scope: Literal["choice", "all"] = "choice"
    """"choice": what a choice calls, canaries and timing. "all": every backend's canary."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The second job of a trial: choose, with the outcomes of all canaries."""

    request: Request
    left_out: Mapping[Pair, str]
    verdicts: Mapping[Pair, str | None]
    spent_s: float
    """Of the contest's budget, what compiling took."""


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """What a trial came to."""

    left_out: Mapping[Pair, str]
    """Backends that ended or blocked the process they were tried in, each with what happened."""
    is_fresh: bool
    """Did it take place now? Then what it did not time is not to be timed now."""


@dataclass(frozen=True, slots=True)
class Means:
    """What a trial has at its disposal."""

    command: Sequence[str] = COMMAND
    patience_s: float = PATIENCE_S
    num_processes: Callable[[int], int] = num_processes


def try_apart(request: Request, tell: Tell, means: Means | None = None) -> TrialOutcome:
    """Try what `request` will call. Where no process can be started, `tell` hears it, and nothing
    is left out."""
    cache = ChoiceCache(cache_folder() / FILE_NAME, tell)
    about = _about(request)
    kept = cache.trial(about)
    crashed = {} if kept is None else {_pair(name): told for name, told in kept.crashes.items()}
    if kept is not None and kept.is_complete:
        return TrialOutcome(crashed, is_fresh=False)
    trial = _Trial(request, tell, means or Means(), crashed)
    try:
        is_complete = trial.run()
    except LostError as error:
        tell(f"kernels could not be tried in a process of their own: {error}")
        return TrialOutcome(trial.left_out, is_fresh=False)
    crashes = {"/".join(pair): sentence for pair, sentence in trial.left_out.items()}
    cache.put_trial(about, crashes, is_complete=is_complete)
    return TrialOutcome(trial.left_out, is_fresh=True)


def _pair(name: str) -> Pair:
    op, backend = name.split("/")
    return op, backend


def _about(request: Request) -> dict[str, Any]:
    """Everything that an outcome depends on."""
    here = snapshot(request.device)
    source = source_digest(Path(__file__).parent)
    return {
        "backends": {name: list(op.backends) for name, op in OPS.items()},
        "forced": dict(request.forced),
        "arch": None if request.arch is None else asdict(request.arch),
        "keys": request.keys,
        "scope": request.scope,
        "dtype": str(request.dtype),
        "device": here.name,
        "versions": here.versions | {"tetrad": __version__, "source": source},
    }


def _flops(unit: Unit) -> float:
    return OPS[unit.op].contract.flops(unit.case)


class _Trial:
    """One trial from its first process to its last."""

    def __init__(
        self, request: Request, tell: Tell, means: Means, left_out: dict[Pair, str]
    ) -> None:
        self.request, self.tell, self.means = request, tell, means
        self.left_out = left_out
        self.verdicts: dict[Pair, str | None] = {}
        """What canaries found of backends that were tried."""
        self.here = snapshot(request.device)
        self.spent_s = 0.0

    def run(self) -> bool:
        """Was everything tried? Raises LostError when no process can be started."""
        is_complete = True
        while units := self._units():
            is_complete &= self._call(units)
        if self.request.scope == "choice":
            began = time.monotonic()
            self._time()
            self.spent_s += time.monotonic() - began
        return is_complete and (self.request.arch is None or self.spent_s < BUDGET_S)

    def _units(self) -> list[Unit]:
        """What there is to call and was not yet: canaries first, then the model's shapes; in both
        those with most to compute first, which compile longest."""
        canaries: list[Unit] = []
        shapes: list[Unit] = []
        for op in OPS.values():
            wanted = self._wanted(op)
            fresh = [each for each in wanted if (op.contract.name, each.name) not in self.verdicts]
            for backend in fresh:
                cases = op.contract.canary_cases(self.request.keys)
                canaries += (self._unit(op, backend, case, 0, CONTEXT_BYTES) for case in cases)
            if len(wanted) > 1 and "auto" in self._asked(op):
                shapes += self._shapes(op, fresh)
        canaries.sort(key=lambda unit: -_flops(unit))
        most: dict[str, float] = {}
        for unit in shapes:
            most[unit.op] = max(most.get(unit.op, 0.0), _flops(unit))
        shapes.sort(key=lambda unit: (-most[unit.op], unit.tokens))
        return [*canaries, *shapes]

    def _asked(self, op: Op) -> set[str]:
        """Names of backends that were asked for in some phase; "auto" where a choice is open."""
        return set(asked_for(op.contract.name, self.request.forced).values())

    def _wanted(self, op: Op) -> list[Backend]:
        """Backends that a choice may call: those that were asked for and, where they cannot be,
        those which would work instead; or all but those that have to be asked for."""
        able = [
            backend
            for backend in op.backends.values()
            if (op.contract.name, backend.name) not in self.left_out
            and backend.why_not(self.here) is None
        ]
        if self.request.scope == "all":
            return able
        asked = self._asked(op)
        alone = [backend for backend in able if backend.name in asked]
        found = [self.verdicts.get((op.contract.name, backend.name)) for backend in alone]
        if alone and "auto" not in asked and not any(found):
            return alone
        return [backend for backend in able if backend.rounding is None or backend in alone]

    def _shapes(self, op: Op, backends: Sequence[Backend]) -> list[Unit]:
        """Calls at the model's shapes; plain torch compiles nothing."""
        if self.request.arch is None or self.request.scope == "all":
            return []
        cases = contest_cases(op, self.request.arch, self.request.keys)
        size = self.request.dtype.itemsize
        largest = max((op.contract.bytes(case, size) for case in cases.values()), default=0.0)
        num_bytes = CONTEXT_BYTES + int(COPIES * largest)
        return [
            self._unit(op, backend, case, tokens, num_bytes)
            for tokens, case in cases.items()
            for backend in backends
            if backend.name != REFERENCE
        ]

    def _unit(self, op: Op, backend: Backend, case: Case, tokens: int, num_bytes: int) -> Unit:
        return Unit(
            op.contract.name, backend.name, case, "shape" if tokens else "canary", tokens,
            num_bytes, self.request.device, self.request.dtype,
        )  # fmt: skip

    def _call(self, units: list[Unit]) -> bool:
        """Call each unit once; were all begun? Beside others one may be lost for another's
        sake, as where main memory is full: it is called once more, alone."""
        num = self.means.num_processes(len(units))
        ways = "a process of its own" if num == 1 else f"{num} processes of their own"
        self.tell(f"compiling and trying kernels: {len(units)} calls in {ways}")
        began = time.monotonic()
        pool, suspects = self._pool(units, num), []
        for ended, tried in enumerate(pool, start=1):
            if tried.lost is not None and num > 1 and not tried.lost.is_late:
                suspects.append(tried.unit)
            else:
                self._note(tried)
            if tried.seconds >= TOLD_S:
                took = f"{tried.unit.label} took {tried.seconds:.0f} s"
                self.tell(f"compiled and tried {ended} of {len(units)} calls; {took}")
        self._check(pool)
        put_off = [*suspects, *pool.put_off]
        again = self._pool([unit for unit in put_off if unit.pair not in self.left_out], 1)
        for tried in again:
            self._note(tried)
        self._check(again)
        if pool.shapes_began is not None:
            self.spent_s += min(time.monotonic() - pool.shapes_began, COMPILE_S)
        self.tell(f"kernels compiled and tried in {time.monotonic() - began:.0f} s")
        return not pool.waiting and not again.waiting

    def _pool(self, units: list[Unit], num: int) -> Pool:
        room = room_on(self.request.device)
        return Pool(units, num, room, COMPILE_S, self.means.command, self.means.patience_s)

    def _check(self, pool: Pool) -> None:
        """Raises LostError when canaries were left for want of a process."""
        if pool.no_process is not None and any(unit.kind == "canary" for unit in pool.waiting):
            raise pool.no_process

    def _note(self, tried: Tried) -> None:
        """What is wrong at the model's shapes, timing finds again."""
        pair = tried.unit.pair
        if tried.lost is not None:
            self._leave_out(pair, tried.lost)
        elif tried.unit.kind == "canary":
            self.verdicts[pair] = self.verdicts.get(pair) or tried.refusal

    def _leave_out(self, pair: Pair, error: LostError) -> None:
        if pair not in self.left_out:
            self.left_out[pair] = f"crashed when it was tried: {error}"
            self.tell(f"{pair[0]} by {pair[1]} {self.left_out[pair]}; it is left out")

    def _time(self) -> None:
        """Choose in one process alone, until one comes to the end."""
        while True:
            process = Process(self.means.command)
            busy: list[Pair] = []
            job = Timing(self.request, dict(self.left_out), dict(self.verdicts), self.spent_s)
            try:
                process.ask(job, self.means.patience_s, partial(self._hear, busy))
            except LostError as error:
                if not busy or busy[-1] in self.left_out:
                    raise
                self._leave_out(busy[-1], error)
            else:
                return
            finally:
                process.close()

    def _hear(self, busy: list[Pair], said: Answer) -> None:
        if "told" in said:
            self.tell(said["told"])
        if "trying" in said:
            op, backend = said["trying"]
            busy.append((op, backend))
