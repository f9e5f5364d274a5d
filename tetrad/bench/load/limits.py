"""What the system lets a load process have: open files and ports."""

from __future__ import annotations

import math
import resource
from pathlib import Path

from tetrad.core.errors import ConfigError

PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
FILES_BESIDE = 256
"""Open files of a process that are no connections."""


def make_room(slots: int, workers: int) -> None:
    """Let each process have a connection for every one of its slots. Raises ConfigError when the
    system does not allow it: else requests would fail one by one, and look like the server's."""
    needed = math.ceil(slots / workers) + FILES_BESIDE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if hard != unlimited and hard < needed:
        raise ConfigError(
            f"{slots} requests in flight need {needed} open files in a process and the system "
            f"allows {hard}; lower --max-concurrency, raise --workers, or raise `ulimit -Hn`."
        )
    if soft != unlimited and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    ports = local_ports()
    if ports is not None and slots > ports:
        raise ConfigError(
            f"{slots} requests in flight to one address need as many ports and the system has "
            f"{ports}; lower --max-concurrency or widen net.ipv4.ip_local_port_range."
        )


def local_ports() -> int | None:
    """Ports that connections to one address may come from; None when the system does not tell."""
    try:
        low, high = (int(word) for word in PORTS.read_text().split())
    except (OSError, ValueError):
        return None
    return high - low + 1
