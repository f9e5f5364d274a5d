"""How many connections the system lets a process have."""

from __future__ import annotations

import contextlib
import resource

MOST = 1 << 20


def allow_connections() -> None:
    """Raise this process's limit of open files, and that of those it starts, as far as may be:
    shells start programs with 1024, and each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
