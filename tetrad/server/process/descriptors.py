"""How many connections the system lets a process have."""

from __future__ import annotations

import contextlib
import resource

MOST = 1 << 20
FEW = 1024
"""Fewer are few enough to tell at start."""


def allow_connections() -> int:
    """Raise this process's limit of open files, and that of those it starts, as far as may be:
    shells start programs with 1024, and each connection is one. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            return most
    return MOST if soft == resource.RLIM_INFINITY else soft


def why_few(limit: int) -> str | None:
    """A sentence where so many open files let few clients in, or None."""
    if limit >= FEW:
        return None
    return (
        f"Warning: the system lets this process open {limit} files, and each client takes one; who "
        f"comes when none is left is turned away. Raise the hard limit to {FEW} or more: "
        f"`ulimit -Hn {FEW}` as root, systemd's LimitNOFILE, or --ulimit nofile of a container."
    )
