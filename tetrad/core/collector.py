"""Python's collector of garbage in cycles, for processes that serve."""

from __future__ import annotations

import gc

COLLECT_AFTER_OBJECTS = 100_000
"""More than the steps in flight hold of 2048 requests."""


def calm_collector() -> None:
    """To be called when all is loaded.

    A step, or a token that is sent, makes and drops some small objects, in no cycles. As it comes,
    the collector would walk through all of them, and through everything that was imported, several
    times a step: a third of the engine's time on the host at 2048 requests, a twelfth of the API
    process's.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER_OBJECTS, 20, 100)


SHORT_WALK_OBJECTS = 20_000


def calm_collector_in_short_walks() -> None:
    """The same for a process that must answer soon: a walk takes 0.4 µs an object, and nobody can
    interrupt it. So the young are looked at by so many, and by twice as many; all as seldom."""
    calm_collector()
    gc.set_threshold(SHORT_WALK_OBJECTS, 1, 2000)
