"""The process of `trial.py`.

Reads a request from standard input; says, a JSON object a line, what it is about to try, what there
is to tell, and that it is done.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys

import torch

from tetrad.core.errors import UnsupportedError
from tetrad.kernels.canary import canary
from tetrad.kernels.choice import Attempt
from tetrad.kernels.device import snapshot
from tetrad.kernels.registry import OPS
from tetrad.kernels.select import resolve_here
from tetrad.kernels.trial import Pair, Request


def main() -> None:
    """A kernel that went wrong is noticed at the next attempt, while its own name still stands."""
    request, left_out = pickle.load(sys.stdin.buffer)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer

    def say(**said: object) -> None:
        answers.write(json.dumps(said) + "\n")

    def attempt(op: str, backend: str) -> None:
        _settle(request.device)
        say(trying=[op, backend])

    if request.scope == "all":
        _try_all(request, left_out, attempt)
    else:
        # whoever asked comes to the same end and tells it
        with contextlib.suppress(UnsupportedError):
            resolve_here(request, left_out, lambda sentence: say(told=sentence), attempt)
    _settle(request.device)
    say(done=True)


def _try_all(request: Request, left_out: dict[Pair, str], attempt: Attempt) -> None:
    place = torch.device(request.device)
    here = snapshot(place)
    for name, op in OPS.items():
        for backend in op.backends.values():
            if (name, backend.name) not in left_out and backend.why_not(here) is None:
                attempt(name, backend.name)
                canary(op, backend, request.dtype, place)


def _settle(device: str) -> None:
    """Wait for the device. An error of an earlier kernel shows here, and ends the process."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
