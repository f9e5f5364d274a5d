"""How long /health takes on a new connection while many streams run.

Starts `tetrad serve --load-format null`, keeps so many streams of /v1/completions open from a
process that reads and looks at nothing, and asks for /health from another, as those do who watch
over a server.

    python benchmarks/health.py --streams 512 2048 --api-workers 1 2 --seconds 20
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from tetrad.cli.child import free_port

PROBE_PERIOD_S = 0.02
LEAVE_S = 2.0
"""In which all streams are closed by their client at once."""
READ_BYTES = 1 << 18
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def request(port: int) -> socket.socket:
    """A stream that outlasts the measurement."""
    body = json.dumps({"prompt": "3", "max_tokens": 100_000, "ignore_eos": True, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    stream = socket.create_connection(("127.0.0.1", port))
    stream.sendall((head + body).encode())
    stream.setblocking(False)
    return stream


def load(port: int, num_streams: int, lead: Connection) -> None:
    """Open all streams, say so once each has said something, and read them until told to end; then
    say how many events came since."""
    selector = selectors.DefaultSelector()
    for _ in range(num_streams):
        selector.register(request(port), selectors.EVENT_READ)
    silent = {key.fd for key in selector.get_map().values()}
    while silent:
        for key, _ in selector.select(0.1):
            assert isinstance(key.fileobj, socket.socket)
            assert key.fileobj.recv(READ_BYTES)
            silent.discard(key.fd)
    lead.send("open")
    num_events = 0
    while True:
        for key, _ in selector.select(0.1):
            assert isinstance(key.fileobj, socket.socket)
            num_events += key.fileobj.recv(READ_BYTES).count(b"data: ")
        if lead.poll():
            lead.send(num_events)
            return


def probe(port: int, is_over: Callable[[], bool], period_s: float = PROBE_PERIOD_S) -> list[float]:
    """Milliseconds of each answer, connecting included."""
    found = []
    while not is_over():
        begun = time.monotonic()
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(HEALTH)
            answer = connection.recv(READ_BYTES)
        assert answer.startswith(b"HTTP/1.1 200"), answer
        found.append((time.monotonic() - begun) * 1e3)
        time.sleep(period_s)
    return found


def cpu(server: subprocess.Popen[bytes]) -> float:
    """Seconds of processors that the API processes have used."""
    first = psutil.Process(server.pid)
    others = [
        child for child in first.children() if "tetrad.server.process.worker" in child.cmdline()
    ]
    times = [process.cpu_times() for process in (first, *others)]
    return sum(each.user + each.system for each in times)


def wait_until_healthy(port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(HEALTH)
                if connection.recv(READ_BYTES).startswith(b"HTTP/1.1 200"):
                    return
        except OSError:
            pass
        time.sleep(0.1)
    raise TimeoutError("the server is not healthy")


@contextmanager
def null_server(
    step_ms: float, num_workers: int, *flags: str
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Port and process of a server without weights."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "tetrad", "serve", "glm-5", "--port", str(port)),
        *("--load-format", "null", "--null-step-ms", str(step_ms)),
        *("--api-workers", str(num_workers), "--max-running-requests", "2048", *flags),
    ]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            wait_until_healthy(port)
            yield port, server
        finally:
            server.terminate()


def told(found: list[float]) -> str:
    """Probes, and their median, 99th percentile and longest."""
    p99 = sorted(found)[int(len(found) * 0.99)]
    return f"{len(found):7d} {statistics.median(found):8.1f} {p99:8.1f} {max(found):8.1f}"


def measure(num_streams: int, num_workers: int, step_ms: float, seconds: float) -> str:
    """One row of the table."""
    with null_server(step_ms, num_workers) as (port, server):
        ours, theirs = multiprocessing.Pipe()
        reader = multiprocessing.Process(target=load, args=(port, num_streams, theirs))
        reader.start()
        begun = time.monotonic()
        at_first = probe(port, ours.poll)
        ours.recv()
        opened_s = time.monotonic() - begun
        begun, cpu_s = time.monotonic(), cpu(server)
        found = probe(port, lambda: time.monotonic() > begun + seconds)
        ours.send("end")
        num_events, took_s = ours.recv(), time.monotonic() - begun
        each_us = (cpu(server) - cpu_s) / max(1, num_events) * 1e6
        left = time.monotonic()
        at_last = probe(port, lambda: time.monotonic() > left + LEAVE_S)
        reader.join()
    return (
        f"{num_streams:7d} {num_workers:7d} {num_events / took_s:9.0f} {each_us:8.1f} "
        f"{told(found)} {max(at_first):8.1f} {max(at_last):8.1f} {opened_s:8.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--api-workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    lines = [
        f"/health on {cores} cores, load average {os.getloadavg()[0]:.1f} before; steps of "
        f"{given.step_ms:g} ms, {given.seconds:g} s each; times in ms",
        "streams workers  events/s us/event  probes   median      p99  longest "
        "beginning   ending opened s",
    ]
    for num_streams in given.streams:
        for num_workers in given.api_workers:
            lines.append(measure(num_streams, num_workers, given.step_ms, given.seconds))
            print(lines[-1], flush=True)
    text = "\n".join(lines)
    print(text)
    if given.output:
        given.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
