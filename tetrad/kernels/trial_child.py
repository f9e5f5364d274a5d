"""The process of `trial_process.py`.

Reads jobs from standard input; says, a JSON object a line, that it is ready, what it is about to
try, what there is to tell, and that a job is done.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
from collections.abc import Callable

import torch

from tetrad.core.errors import UnsupportedError
from tetrad.kernels.canary import canary_case, told
from tetrad.kernels.choice import call_of
from tetrad.kernels.registry import OPS
from tetrad.kernels.select import resolve_here
from tetrad.kernels.trial import Timing
from tetrad.kernels.trial_pool import Unit


def main() -> None:
    """A kernel that went wrong is noticed at the next wait, while its own name still stands."""
    jobs = sys.stdin.buffer
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer

    def say(**said: object) -> None:
        answers.write(json.dumps(said) + "\n")

    say(ready=True)
    while True:
        try:
            job = pickle.load(jobs)
        except EOFError:
            return
        if isinstance(job, Unit):
            refusal = _call(job)
            _settle(job.device)
            say(done=True, refusal=refusal)
        else:
            _choose(job, say)
            _settle(job.request.device)
            say(done=True)


def _call(unit: Unit) -> str | None:
    """Why the backend cannot be used, as far as one call tells."""
    op, place = OPS[unit.op], torch.device(unit.device)
    backend = op.backends[unit.backend]
    if unit.kind == "canary":
        return canary_case(op, backend, unit.case, unit.dtype, place)
    try:
        inputs = op.check.inputs(unit.case, unit.dtype, place)
        call_of(op, backend, inputs, unit.dtype)()
    except Exception as error:  # noqa: BLE001  # a kernel may fail in any way
        return told(error)
    return None


def _choose(job: Timing, say: Callable[..., None]) -> None:
    """Whoever asked comes to the same end, an error too, and tells it."""

    def attempt(op: str, backend: str) -> None:
        _settle(job.request.device)
        say(trying=[op, backend])

    with contextlib.suppress(UnsupportedError):
        resolve_here(
            job.request,
            job.left_out,
            lambda sentence: say(told=sentence),
            attempt,
            verdicts=job.verdicts,
            spent_s=job.spent_s,
        )


def _settle(device: str) -> None:
    """Wait for the device and give its memory back. An error of an earlier kernel shows here, and
    ends the process."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
