"""Where each thread of a process is, told on stderr when something asks."""

from __future__ import annotations

import contextlib
import faulthandler
import signal

STACKS_SIGNAL = signal.SIGUSR1
STACKS_WAIT_S = 0.5
"""How long a process may take to tell."""


def show_stacks_when_asked() -> None:
    """On SIGUSR1, and when the process crashes, write the stack of every thread.

    The handler is C's: it also answers while foreign code keeps the interpreter. A process whose
    stderr is closed or replaced tells nothing.
    """
    with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):
        faulthandler.enable()
        faulthandler.register(STACKS_SIGNAL, all_threads=True)
