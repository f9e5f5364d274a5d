"""Chooses a backend for every op: ask each in order of preference, keep the refusals.

A backend is used when its `why_not` has nothing to say, it did not crash when it was tried in a
process of its own (on a GPU: `trial.py`), and its canary gives the right numbers on this device.
Where several pass on a GPU, their time at the model's shapes decides. A forced backend that cannot
be used is an error that says what would work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch

from tetrad.core.arch import ModelArch
from tetrad.core.errors import UnsupportedError, nearest
from tetrad.core.hardware import DeviceSnapshot
from tetrad.core.keys import ACTIVATION, KeyFormat
from tetrad.kernels.backend import Backend, Op
from tetrad.kernels.canary import canary
from tetrad.kernels.choice import BUDGET_S, Attempt, Contest, Outcome
from tetrad.kernels.contenders import (
    PHASE_OPS,
    PHASES,
    Regime,
    Times,
    asked_for,
    backend_in,
    by_phase,
    by_rows,
)
from tetrad.kernels.device import snapshot
from tetrad.kernels.registry import OPS
from tetrad.kernels.trial import Pair, Request, try_apart

FLAG_OPS: Mapping[str, str] = {
    "moe_runner_backend": "experts",
    "attention_backend": "mla",
    "decode_attention_backend": "mla.decode",
    "prefill_attention_backend": "mla.prefill",
}
"""Field of `ServeConfig` that forces a backend → the op it forces, or the op in one phase."""


@dataclass(frozen=True, slots=True)
class OpChoice:
    """Which backend an op got, and why not the others."""

    op: str
    backend: str
    reason: str
    refusals: dict[str, str] = field(default_factory=dict)
    """Backend → the sentence that ruled it out. Without timing, backends after the chosen one are
    not asked."""
    times_us: Times = field(default_factory=dict)
    """Backend → tokens of a step → microseconds, where time decided."""
    regimes: tuple[Regime, ...] = ()
    """Which backend runs steps of which size, where that differs; `backend` then names them all."""
    remarks: dict[str, str] = field(default_factory=dict)
    """Backend of this op → what whoever chooses it should know."""


@dataclass(frozen=True, slots=True)
class OpSet:
    """The chosen backend of each op; call one as its contract says: `ops.rope(x, cos, ...)`."""

    rms_norm: Backend
    add_rms_norm: Backend
    latents: Backend
    rope: Backend
    head_linear: Backend
    absorb: Backend
    linear: Backend
    activation: Backend
    router: Backend
    route: Backend
    route_activate: Backend
    sort_tokens: Backend
    experts: Backend
    reduce_experts: Backend
    index_score: Backend
    index_select: Backend
    mla: Backend
    qkv: Backend
    gqa: Backend
    finite_rows: Backend
    sample: Backend
    choices: tuple[OpChoice, ...]

    @property
    def report(self) -> list[dict[str, Any]]:
        """One JSON-ready row per op: op, backend, reason, refusals."""
        return [asdict(choice) for choice in self.choices]


OP_NAMES = tuple(f.name for f in fields(OpSet) if f.name != "choices")


def resolve_ops(
    device: str,
    forced: Mapping[str, str] | None = None,
    dtype: torch.dtype = torch.float32,
    arch: ModelArch | None = None,
    tell: Callable[[str], None] = lambda _sentence: None,
    keys: KeyFormat = ACTIVATION,
) -> OpSet:
    """Choose for "cpu" or "cuda", activations of `dtype`, and keys cached as `keys`.

    `forced` maps an op, or one of PHASE_OPS in a phase ("mla.decode"), to the backend it must have,
    the latter before the former; "auto" leaves the choice open: on a GPU to the
    fastest at the shapes of `arch` where that is given, else to the first that can run. `tell`
    hears what is being tried and timed. Raises UnsupportedError when a forced op or backend does
    not exist or cannot run here.
    """
    request = Request(device, dtype, dict(forced or {}), arch, keys)
    for slot, wanted in request.forced.items():
        name, _, phase = slot.partition(".")
        if name not in OPS or (phase and (name not in PHASE_OPS or phase not in PHASES)):
            raise UnsupportedError(f"There is no op {slot!r}.{nearest(slot, OPS)}")
        _check_name(OPS[name], wanted, slot)
    if torch.device(device).type == "cpu":
        return resolve_here(request, {}, tell)
    outcome = try_apart(request, tell)
    tell("checking kernels in this process")
    spent_s = BUDGET_S if outcome.is_fresh else 0.0
    return resolve_here(request, outcome.left_out, tell, spent_s=spent_s)


def resolve_here(
    request: Request,
    left_out: Mapping[Pair, str],
    tell: Callable[[str], None],
    attempt: Attempt = lambda _op, _backend: None,
    verdicts: Mapping[Pair, str | None] | None = None,
    spent_s: float = 0.0,
) -> OpSet:
    """`resolve_ops` in this very process. `left_out`: (op, backend) → why it is not to be called;
    `attempt` hears the name of each before it is. `verdicts`: what canaries found before, which are
    not repeated; `spent_s`: what the contest has used of its budget."""
    place, dtype, forced = torch.device(request.device), request.dtype, request.forced
    here = snapshot(place)

    def refusal(op: Op, backend: Backend) -> str | None:
        pair = (op.contract.name, backend.name)
        sentence = backend.why_not(here) or left_out.get(pair)
        if sentence is not None:
            return sentence
        if verdicts is not None and pair in verdicts:
            return verdicts[pair]
        attempt(op.contract.name, backend.name)
        return canary(op, backend, dtype, place, request.keys)

    contest = None
    if request.arch is not None and here.kind == "cuda":
        contest = Contest(
            request.arch, dtype, place, here, tell, attempt, spent_s=spent_s, keys=request.keys
        )
    choices = tuple(
        replace(
            _choose(OPS[name], forced, here, refusal, contest),
            remarks={
                each.name: each.remarks for each in OPS[name].backends.values() if each.remarks
            },
        )
        for name in OP_NAMES
    )
    if contest is not None:
        contest.close()
    return OpSet(**{choice.op: _chosen(choice) for choice in choices}, choices=choices)


def backend_names(ops: OpSet) -> dict[str, str]:
    """Field of `ServeConfig` → the name of what it chooses."""
    choices = {choice.op: choice for choice in ops.choices}
    names = {}
    for flag, slot in FLAG_OPS.items():
        name, _, phase = slot.partition(".")
        names[flag] = backend_in(phase, choices[name].regimes) or choices[name].backend
    return names


def _choose(
    op: Op,
    forced: Mapping[str, str],
    here: DeviceSnapshot,
    refusal: Callable[[Op, Backend], str | None],
    contest: Contest | None,
) -> OpChoice:
    """`choose` as `forced` says, in both phases or in each."""
    name = op.contract.name
    wanted = asked_for(name, forced)
    if len(set(wanted.values())) == 1:
        return choose(op, wanted["decode"], here, refusal, contest)
    found = {
        phase: choose(op, each, here, refusal, contest, f"{name}.{phase}")
        for phase, each in wanted.items()
    }
    names = {
        phase: backend_in(phase, choice.regimes) or choice.backend
        for phase, choice in found.items()
    }
    refusals: dict[str, str] = {}
    times: Times = {}
    for choice in found.values():
        refusals |= choice.refusals
        times |= choice.times_us
    return OpChoice(
        name,
        "+".join(dict.fromkeys(names.values())),
        "; ".join(f"{phase}: {choice.reason}" for phase, choice in found.items()),
        refusals,
        times,
        tuple(Regime(names[phase], None, phase) for phase in PHASES),
    )


def _chosen(choice: OpChoice) -> Backend:
    backends = OPS[choice.op].backends
    if choice.regimes and choice.regimes[0].phase is not None:
        return by_phase(choice.regimes, backends)
    return by_rows(choice.regimes, backends) if choice.regimes else backends[choice.backend]


def choose(
    op: Op,
    wanted: str,
    here: DeviceSnapshot,
    refusal: Callable[[Op, Backend], str | None],
    contest: Contest | None = None,
    slot: str | None = None,
) -> OpChoice:
    """The backend named `wanted` for `slot`, a key of `forced` (default: the op); for "auto" the
    first that `refusal` lets pass, or of all these the one that wins `contest`, but none that
    rounds on the way."""
    name = op.contract.name
    _check_name(op, wanted, slot or name)
    refusals: dict[str, str] = {}
    survivors: list[Backend] = []
    for backend in op.backends.values() if wanted == "auto" else (op.backends[wanted],):
        if wanted == "auto" and backend.rounding is not None:
            refusals[backend.name] = backend.why_not(here) or _left_alone(op, backend)
            continue
        if (sentence := refusal(op, backend)) is not None:
            refusals[backend.name] = sentence
            continue
        survivors.append(backend)
        if contest is None:
            break
    if contest is not None and len(survivors) > 1:
        outcome = contest.decide(op, survivors)
        refusals |= outcome.refusals
        if outcome.regimes:
            return _timed(name, outcome, refusals)
    elif survivors:
        return OpChoice(name, survivors[0].name, _reason(op, wanted, refusals), refusals)
    told = "; ".join(f"{backend}: {sentence}" for backend, sentence in refusals.items())
    if wanted == "auto":
        raise UnsupportedError(f"No backend of {name} can run on {here.name}: {told}.")
    others = [
        other.name
        for other in op.backends.values()
        if other.name not in refusals and other.rounding is None and refusal(op, other) is None
    ]
    cure = f" {_listed(others)} or 'auto' would work." if others else ""
    raise UnsupportedError(
        f"{_asked(slot or name, wanted)}this backend of {name} cannot run on {here.name}: "
        f"{told.rstrip('.')}.{cure}"
    )


def _check_name(op: Op, wanted: str, slot: str) -> None:
    if wanted != "auto" and wanted not in op.backends:
        name = op.contract.name
        raise UnsupportedError(
            f"{_asked(slot, wanted)}{name} has no backend {wanted!r}; it has "
            f"{_listed(op.backends)}, or 'auto' to let Tetrad choose."
            f"{nearest(wanted, op.backends)}"
        )


def _asked(slot: str, wanted: str) -> str:
    """The flag that forced a backend, if there is one: "--attention-backend triton: "."""
    for flag, forced in FLAG_OPS.items():
        if forced == slot:
            return f"--{flag.replace('_', '-')} {wanted}: "
    return ""


def _left_alone(op: Op, backend: Backend) -> str:
    """Why "auto" does not take a backend that may run here."""
    assert backend.rounding is not None
    asked = _asked(op.contract.name, backend.name).removesuffix(": ")
    return f"{backend.rounding.meaning}, so it has to be asked for: {asked}"


def _timed(name: str, outcome: Outcome, refusals: dict[str, str]) -> OpChoice:
    regimes = outcome.regimes if len(outcome.regimes) > 1 else ()
    backend = "+".join(dict.fromkeys(regime.backend for regime in outcome.regimes))
    return OpChoice(name, backend, outcome.reason, refusals, outcome.times_us, regimes)


def _reason(op: Op, wanted: str, refusals: dict[str, str]) -> str:
    if wanted != "auto":
        return "asked for"
    if len(op.backends) == 1:
        return "the only one"
    return "the first choice" if not refusals else "the first that can run here"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
