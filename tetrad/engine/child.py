"""How Tetrad's processes start other processes."""

from __future__ import annotations

import os
from pathlib import Path

SPIN_COUNT = "10000"
"""Turns for which a thread of GNU's OpenMP spins before it sleeps, about 0.2 ms: longer than most
pauses between two parallel operations of a step."""


def environment() -> dict[str, str]:
    """Ours, with this very package to be found first. The current folder is not searched (-P): a
    stray file there must not stand in for a module.

    Threads of OpenMP that wait for others sleep, but not at once. By default they spin for
    milliseconds, and a team of which one thread waits for a core that others use then costs many
    times the work it shares; if they sleep at once, waking them costs as much as they save.
    """
    root = str(Path(__file__).parents[2])
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join(filter(None, (root, inherited)))
    waiting = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": SPIN_COUNT}
    return {**waiting, **os.environ, "PYTHONPATH": path}
