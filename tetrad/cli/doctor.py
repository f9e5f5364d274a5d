"""`tetrad doctor`: what this machine is, what can run on it, and why something cannot."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tetrad.cli.flags import verb
from tetrad.cli.machine import Machine, look
from tetrad.cli.narrator import Narrator
from tetrad.cli.options import DoctorConfig

if TYPE_CHECKING:
    from rich.table import Table

    from tetrad.kernels.backend import Backend, Op


@dataclass(frozen=True, slots=True)
class BackendState:
    """What one backend of an op said and did here."""

    op: str
    backend: str
    is_chosen: bool
    refusal: str | None
    """Why it cannot be used, or None: its canary gave the right numbers."""
    reason: str
    """Why it was chosen, or ""."""
    check_ms: float
    remarks: str
    """What whoever chooses it should know, or ""."""


@dataclass(slots=True)
class Diagnosis:
    """Everything that was found. `problems` is empty when Tetrad can serve here."""

    machine: Machine
    device: str | None = None
    dtype: str | None = None
    backends: list[BackendState] = field(default_factory=list)
    model: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def _doctor(config: DoctorConfig) -> int:
    """Look, try, tell. Exit code 0 when everything that serving needs works."""
    found = Diagnosis(look())
    if not config.json_:
        _print_machine(found.machine)
    try:
        import torch
    except ImportError as error:
        found.problems.append(
            f"torch cannot be imported ({error}); install it with `pip install torch`."
        )
    else:
        _examine_device(found, config, torch.cuda.is_available())
    _examine_model(found)
    if config.json_:
        print(json.dumps(asdict(found), indent=2))
    else:
        _print(found)
    return 1 if found.problems else 0


def _examine_device(found: Diagnosis, config: DoctorConfig, has_cuda: bool) -> None:
    if found.machine.gpus and not has_cuda:
        found.problems.append(
            "there is a GPU but this torch cannot use it; install a CUDA build of torch."
        )
    if config.device == "cuda" and not has_cuda:
        found.problems.append("--device cuda: torch finds no CUDA device here.")
        return
    wants_cuda = config.device == "cuda" or (config.device == "auto" and has_cuda)
    found.device, found.dtype = ("cuda", "bfloat16") if wants_cuda else ("cpu", "float32")
    _examine_backends(found)


def _examine_backends(found: Diagnosis) -> None:
    import torch

    from tetrad.core.errors import UnsupportedError
    from tetrad.kernels.canary import canary
    from tetrad.kernels.device import snapshot
    from tetrad.kernels.registry import OPS
    from tetrad.kernels.select import choose
    from tetrad.kernels.trial import Request, try_apart

    assert found.device is not None
    assert found.dtype is not None
    place, dtype = torch.device(found.device), getattr(torch, found.dtype)
    here = snapshot(place)
    left_out: Mapping[tuple[str, str], str] = {}
    if place.type == "cuda":
        request = Request(found.device, dtype, scope="all")
        left_out = try_apart(request, Narrator().stage).left_out
    tried: dict[tuple[str, str], tuple[str | None, float]] = {}

    def refusal(op: Op, backend: Backend) -> str | None:
        key = (op.contract.name, backend.name)
        if key not in tried:
            begun = time.perf_counter()
            sentence = (
                backend.why_not(here) or left_out.get(key) or canary(op, backend, dtype, place)
            )
            tried[key] = (sentence, (time.perf_counter() - begun) * 1e3)
        return tried[key][0]

    for name, op in OPS.items():
        chosen, reason = None, ""
        try:
            choice = choose(op, "auto", here, refusal)
            chosen, reason = choice.backend, choice.reason
        except UnsupportedError as error:
            found.problems.append(str(error))
        for backend in op.backends.values():
            sentence = refusal(op, backend)
            check_ms = tried[name, backend.name][1]
            is_chosen = backend.name == chosen
            found.backends.append(
                BackendState(
                    name,
                    backend.name,
                    is_chosen,
                    sentence,
                    reason if is_chosen else "",
                    check_ms,
                    backend.remarks,
                )
            )


def _examine_model(found: Diagnosis) -> None:
    from tetrad.core.arch import ModelArch
    from tetrad.core.errors import CheckpointError
    from tetrad.data import embedded_model

    folder = embedded_model()
    try:
        arch = ModelArch.from_folder(folder)
    except CheckpointError as error:
        found.problems.append(f"the embedded model: {error}")
        return
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        found.problems.append(f"the embedded model: {folder} holds no weights.")
    found.model = {
        "folder": str(folder),
        "model_type": arch.model_type,
        "num_layers": arch.num_layers,
        "num_experts": arch.moe.num_experts,
        "weight_bytes": sum(path.stat().st_size for path in weights),
    }


def _print_machine(machine: Machine) -> None:
    from rich.console import Console

    Console().print(_machine_table(machine))
    sys.stdout.flush()  # what follows takes half a minute on a GPU


def _print(found: Diagnosis) -> None:
    from rich.console import Console

    if found.backends:
        Console().print(_backend_table(found))
        for sentence in _reasons(found):
            print(sentence)
    if found.model:
        name, size_mb = Path(found.model["folder"]).name, found.model["weight_bytes"] / 1e6
        print(
            f"Embedded model: {name}, {found.model['model_type']}, {found.model['num_layers']} "
            f"layers, {found.model['num_experts']} experts, {size_mb:.1f} MB"
        )
    for problem in found.problems:
        print(f"PROBLEM: {problem}")
    if not found.problems:
        print(f"Tetrad can serve here, on the {'GPU' if found.device == 'cuda' else 'CPU'}.")


def _machine_table(machine: Machine) -> Table:
    from rich.table import Table

    table = Table(title="Machine", title_justify="left", show_header=False)
    table.add_row("system", machine.system)
    table.add_row("processor", f"{machine.processor}, {machine.num_cores} logical cores")
    memory = f"{machine.memory_bytes / 1e9:.1f} GB, {machine.available_bytes / 1e9:.1f} free"
    table.add_row("memory", memory)
    for gpu in machine.gpus:
        free = f"{gpu.memory_bytes / 1e9:.0f} GB, {gpu.free_bytes / 1e9:.0f} free"
        table.add_row(
            "GPU", f"{gpu.name}, capability {gpu.capability}, {free}, driver {gpu.driver}"
        )
    if machine.gpu_note:
        table.add_row("GPU", f"none: {machine.gpu_note}")
    table.add_row("Python", machine.python)
    versions = [f"{name} {version}" for name, version in machine.packages.items()]
    table.add_row("packages", ", ".join(versions))
    return table


def _backend_table(found: Diagnosis) -> Table:
    """One row an op: what was chosen, what else computed a small case right, what was refused."""
    from rich.table import Table

    title = f"Backends on {found.device}, {found.dtype}"
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.caption = "chosen and right: has computed a small case right on this device"
    for heading in ("op", "chosen", "also right", "refused"):
        table.add_column(heading)
    for op in dict.fromkeys(state.op for state in found.backends):
        states = [state for state in found.backends if state.op == op]
        chosen = next((state for state in states if state.is_chosen), None)
        right = [s.backend for s in states if s.refusal is None and not s.is_chosen]
        refused = [state.backend for state in states if state.refusal is not None]
        name = "none" if chosen is None else chosen.backend
        table.add_row(op, name, ", ".join(right), ", ".join(refused))
    return table


def _reasons(found: Diagnosis) -> list[str]:
    """Each sentence once: why backends are refused, and what to know of those that are not."""
    said: dict[str, dict[str, list[str]]] = {}
    ops: dict[str, list[str]] = {}
    for state in found.backends:
        ops.setdefault(state.backend, []).append(state.op)
        for sentence in filter(None, (state.refusal, state.remarks)):
            said.setdefault(sentence, {}).setdefault(state.backend, []).append(state.op)
    return [
        f"{', '.join(_where(name, its, ops[name]) for name, its in who.items())}: {sentence}"
        for sentence, who in said.items()
    ]


def _where(backend: str, ops: list[str], all_ops: list[str]) -> str:
    """The backend, and for which ops where that is not all that have it."""
    return backend if ops == all_ops else f"{backend} of {' and '.join(ops)}"


doctor = verb(DoctorConfig, _doctor)
