"""The sampler: a process that looks at the GPUs and at the server while others carry the load.

`python -m tetrad.bench.telemetry.process` reads its job from one line of JSON, answers with a line
about what it found, watches until its input ends, and then writes all that it saw. Nothing passes
between it and the load generator in the meantime. Times are `time.perf_counter`, the clock that all
processes of a machine share.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from tetrad.bench.telemetry.gpus import Gpus
from tetrad.bench.telemetry.server import ServerFigures

PAUSES = 50
"""A look is followed by so many times its own length, so that it takes at most 2 % of a core."""
LONGEST_PAUSE_S = 5.0
KINDNESS = 10
"""Niceness: on a busy machine the load goes first."""


class Watch(threading.Thread):
    """Looks again and again until it is stopped, and once more then."""

    def __init__(self, look: Callable[[], Any], period_s: float) -> None:
        super().__init__(daemon=True)
        self.samples: list[tuple[float, Any]] = []
        self.took_s: list[float] = []
        self._look = look
        self._period_s = period_s
        self._stopped = threading.Event()

    def look(self) -> float:
        """One sample, at the middle of the time it took; returns that time."""
        begun_s = time.perf_counter()
        value = self._look()
        ended_s = time.perf_counter()
        if value is not None:
            self.samples.append(((begun_s + ended_s) / 2, value))
        self.took_s.append(ended_s - begun_s)
        return ended_s - begun_s

    def run(self) -> None:
        took_s = 0.0
        while not self._stopped.wait(self._pause_s(took_s)):
            took_s = self.look()
        self.look()

    def _pause_s(self, took_s: float) -> float:
        return max(self._period_s - took_s, min(PAUSES * took_s, LONGEST_PAUSE_S))

    def stop(self) -> None:
        """The last look is the next one."""
        self._stopped.set()


def is_this_machine(url: str) -> bool:
    """Does the server's name lead to an address of this machine? One can be bound, others not."""
    host = urlsplit(url).hostname or ""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(_binds(family, address) for family, _, _, _, address in found)


def _binds(family: int, address: Any) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def find_gpus(job: dict[str, Any]) -> tuple[Gpus | None, str]:
    """The GPUs to watch, or why none are."""
    if not job["telemetry"] and not job["gpus"] and not is_this_machine(job["url"]):
        return None, "the server is on another machine; --telemetry samples this one's all the same"
    gpus = Gpus(job["gpus"])
    return (None, gpus.why_none) if gpus.why_none else (gpus, "")


def watch(
    job: dict[str, Any], say: Callable[[dict[str, Any]], None], wait: Callable[[], Any]
) -> None:
    """Say what was found, watch until `wait` returns, say what was seen."""
    gpus, why_no_gpus = find_gpus(job)
    server = ServerFigures(job["url"], job["headers"])
    server.find()
    watches = {
        "gpus": Watch(gpus.read, job["period_s"]) if gpus is not None else None,
        "server": Watch(server.read, job["period_s"]) if not server.why_none else None,
    }
    running = [each for each in watches.values() if each is not None]
    for each in running:
        each.look()
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    say(
        {
            "gpus": gpus.facts if gpus is not None else [],
            "why_no_gpus": why_no_gpus,
            "route": server.route,
            "dialect": server.dialect,
            "why_no_server": server.why_none,
        }
    )
    if not running:
        return
    for each in running:
        each.start()
    wait()
    for each in running:
        each.stop()
    for each in running:
        each.join()
    seen: dict[str, Any] = {
        name: None if each is None else {"samples": each.samples, "took_s": each.took_s}
        for name, each in watches.items()
    }
    cpu_s, span_s = time.process_time() - begun_cpu_s, time.perf_counter() - begun_s
    say({**seen, "cpu_s": cpu_s, "span_s": span_s})


def main() -> None:
    """Over standard input and output; it ends with its parent, not with an interrupt."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(KINDNESS)

    def say(words: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(words) + "\n")
        sys.stdout.flush()

    watch(json.loads(sys.stdin.readline()), say, sys.stdin.read)


if __name__ == "__main__":
    main()
