"""How processes of ours start others."""

from __future__ import annotations

import os
from pathlib import Path


def environment() -> dict[str, str]:
    """Ours, with this very package to be found first. The current folder is not searched (-P): a
    stray file there must not stand in for a module.

    Threads of OpenMP wait passively. By default they spin, and a team of which one thread waits for
    a core that others use then costs many times the work it shares.
    """
    root = str(Path(__file__).parents[2])
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join(filter(None, (root, inherited)))
    return {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PYTHONPATH": path}
