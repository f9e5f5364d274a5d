"""Tries backends in a process of their own, before the process that serves calls any.

A canary tells wrong numbers. A kernel that reads where it must not, or never ends, takes its
process with it; here that is one which has nothing to lose. What it was busy with is left out, and
another goes on with the rest. Outcomes are kept, so that later starts try nothing.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import torch

from tetrad import __version__
from tetrad.core.arch import ModelArch
from tetrad.kernels.choice_cache import FILE_NAME, ChoiceCache, cache_folder, source_digest
from tetrad.kernels.device import snapshot
from tetrad.kernels.registry import OPS

CHILD = (sys.executable, "-m", "tetrad.kernels.trial_child")
PATIENCE_S = 300.0
"""For one backend at one shape. Compiling takes most of it, on a slow machine a minute or two."""
START_S = 120.0
"""For a process to import torch and begin."""

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
    scope: Literal["choice", "all"] = "choice"
    """"choice": what a choice calls, canaries and timing. "all": every backend's canary."""


@dataclass(frozen=True, slots=True)
class Crash:
    """How a trial's process ended before its time."""

    pair: Pair | None
    """What it was busy with, None where it had not come that far."""
    sentence: str


def crashes(
    request: Request, tell: Tell, command: Sequence[str] = CHILD, patience_s: float = PATIENCE_S
) -> dict[Pair, str]:
    """Backends that ended or blocked the process they were tried in, each with what happened."""
    cache = ChoiceCache(cache_folder() / FILE_NAME, tell)
    about = _about(request)
    kept = cache.trial(about)
    if kept is not None:
        return {_pair(name): sentence for name, sentence in kept.items()}
    tell("trying kernels in a process of their own")
    found: dict[Pair, str] = {}
    while (crash := _run(request, found, tell, command, patience_s)) is not None:
        if crash.pair is None or crash.pair in found:
            tell(f"kernels could not be tried in a process of their own: {crash.sentence}")
            return found
        found[crash.pair] = f"crashed when it was tried: {crash.sentence}"
        tell(f"{crash.pair[0]} by {crash.pair[1]} {found[crash.pair]}; it is left out")
    cache.put_trial(about, {"/".join(pair): sentence for pair, sentence in found.items()})
    return found


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
        "scope": request.scope,
        "dtype": str(request.dtype),
        "device": here.name,
        "versions": here.versions | {"tetrad": __version__, "source": source},
    }


def _run(
    request: Request,
    left_out: Mapping[Pair, str],
    tell: Tell,
    command: Sequence[str],
    patience_s: float,
) -> Crash | None:
    """One process; None when it came to its end."""
    busy: Pair | None = None
    with tempfile.TemporaryFile() as errors:
        with _started(command, (request, dict(left_out)), errors) as (process, lines):
            while (said := _next(lines, patience_s if busy else START_S)) is not None:
                if "done" in said:
                    return None
                if "late" in said:
                    seconds = patience_s if busy else START_S
                    return Crash(busy, f"it did not come back within {seconds:g} s")
                if "told" in said:
                    tell(said["told"])
                if "trying" in said:
                    busy = tuple(said["trying"])
            code = process.wait()
        errors.seek(0)
        last = errors.read().decode(errors="replace").strip().splitlines()[-1:]
    if code < 0:
        return Crash(busy, f"its process got {signal.Signals(-code).name}")
    return Crash(busy, f"its process ended: {(last or [f'exit code {code}'])[0][:300]}")


Lines = queue.Queue[bytes | None]


@contextmanager
def _started(
    command: Sequence[str], request: object, errors: IO[bytes]
) -> Iterator[tuple[subprocess.Popen[bytes], Lines]]:
    """A process that has got its request, and its output, None at the end; killed afterwards."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    lines: Lines = queue.Queue()
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
        reader.start()
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(pickle.dumps(request))
                process.stdin.close()
            yield process, lines
        finally:
            process.kill()
            reader.join()


def _read(output: IO[bytes], lines: Lines) -> None:
    for line in output:
        lines.put(line)
    lines.put(None)


def _next(lines: Lines, patience_s: float) -> dict[str, Any] | None:
    """What the process says next; {"late": True} after too long, None after its end. What
    libraries print while they are imported is passed over."""
    while True:
        try:
            line = lines.get(timeout=patience_s)
        except queue.Empty:
            return {"late": True}
        if line is None:
            return None
        with suppress(ValueError):
            said = json.loads(line)
            if isinstance(said, dict):
                return said
