"""Thousands of streams for minutes, many of whom leave, beside clients that mean harm.

Starts `tetrad serve --load-format null`, whose tokens are known beforehand, keeps so many streams
open, ends a share of them at a random token by closing the connection, and does to the server what
hostile clients do. At the end everything must be as at the beginning: no page, descriptor or
request is left, and every stream got all of its own text and nothing else.

    python benchmarks/soak.py --streams 2048 --minutes 10 --output benchmarks/results/soak_cpu.txt
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httptools
import msgspec
import psutil
import tokenizers
import uvloop

from tetrad.cli.child import free_port
from tetrad.core.presets import served_shapes
from tetrad.data import embedded_model
from tetrad.engine.null import scripted_token

STARTS_PER_S = 400
SAMPLE_S = 10.0
PROBE_S = 0.5
FEWEST_TOKENS, MOST_TOKENS = 64, 192
HARM = (
    b"GET /health HTTP/1.1\r\nX-A: ",
    b"POST /generate HTTP/1.1\r\nContent-Length: 999999\r\n\r\n" + b"[" * 50_000,
    b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 120009\r\n\r\n"
    b'{"tools":' + b"[" * 60_000 + b"]" * 60_000,
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: 10000013\r\n\r\n"
    b'{"prompt":"' + b"x" * 10_000_000 + b'"}',
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2000013\r\n\r\n"
    b'{"prompt":[1' + b",1" * 1_000_000 + b"]}",
    b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 20_000,
    b"\x16\x03\x01" + bytes(range(256)) * 40,
    b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 2000,
    b"GET /health HTTP/1.1\r\n" + b"X-A: b\r\n" * 20_000 + b"\r\n",
)
"""Sent whole by a client that then waits, and reads nothing."""


class Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class Event(msgspec.Struct):
    id: str = ""
    choices: list[Choice] = msgspec.field(default_factory=list)
    error: dict[str, object] | None = None


decode = msgspec.json.Decoder(Event).decode


class Script:
    """What each stream must get: its tokens follow from its seed."""

    def __init__(self) -> None:
        folder = embedded_model()
        shapes = served_shapes(folder, "null")
        self._vocab, self._eos = shapes.vocab, frozenset(shapes.eos_ids)
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

    def text(self, seed: int, num_tokens: int) -> str:
        """By the tokenizer's own decoder, which the server does not use."""
        ids = [scripted_token(seed, at, self._vocab, self._eos) for at in range(num_tokens)]
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


@dataclass
class Counts:
    """Of all streams."""

    ends: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    open: int = 0
    samples: list[str] = field(default_factory=list)
    """Of those that went wrong."""


class Stream(asyncio.Protocol):
    """One request on a connection of its own, read as it comes."""

    def __init__(self, counts: Counts, seed: int, num_tokens: int, leave_after: int | None) -> None:
        self._counts, self.seed, self._num_tokens = counts, seed, num_tokens
        self._leave_after = leave_after
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""
        self.text, self.ids, self.num_events = "", set[str](), 0
        self.how = ""
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        body = msgspec.json.encode(
            {
                "prompt": [5 + self.seed % 200, 6, 7],
                "max_tokens": self._num_tokens,
                "seed": self.seed,
                "ignore_eos": True,
                "skip_special_tokens": False,
                "stream": True,
            }
        )
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        transport.write(head.encode() + body)

    def data_received(self, data: bytes) -> None:
        if not self.how:
            self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        *events, self._rest = (self._rest + body).split(b"\n\n")
        for event in events:
            if not self.how:
                self._take(event.removeprefix(b"data: "))

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._end("done")
            return
        event = decode(data)
        if event.error is not None or not event.choices:
            self._end(f"error: {data[:200]!r}")
            return
        self.num_events += 1
        self._counts.tokens += 1
        self.ids.add(event.id)
        self.text += event.choices[0].text
        if self.num_events == self._leave_after:
            self._end("left")

    def _end(self, how: str) -> None:
        self.how = how
        self._transport.abort()

    def connection_lost(self, _error: Exception | None) -> None:
        self.how = self.how or f"lost after {self.num_events} events"
        if not self.over.done():
            self.over.set_result(None)


class Soak:
    """One run."""

    def __init__(self, port: int, options: argparse.Namespace) -> None:
        self._port, self._options = port, options
        self._script, self._rng = Script(), random.Random(0)
        self.counts = Counts()
        self._seed = 0
        self.ends_at = time.monotonic() + 60 * options.minutes
        self.probes_ms: list[float] = []
        self.harm = 0

    async def run(self, sample: object) -> None:
        """Until the time is over and every stream has ended."""
        tasks = [asyncio.create_task(self._slot(n)) for n in range(self._options.streams)]
        others = [asyncio.create_task(work) for work in (self._probe(), self._be_hostile())]
        sampling = asyncio.create_task(self._sample(sample))
        await asyncio.gather(*tasks, *others)
        sampling.cancel()

    async def _slot(self, number: int) -> None:
        """One stream after the other."""
        await asyncio.sleep(number / STARTS_PER_S)
        while time.monotonic() < self.ends_at:
            await self._one()

    async def _one(self) -> None:
        rng, counts = self._rng, self.counts
        self._seed += 1
        num_tokens = rng.randint(FEWEST_TOKENS, MOST_TOKENS)
        leaves = rng.random() < self._options.leave
        stream = Stream(
            counts, self._seed, num_tokens, rng.randint(1, num_tokens // 2) if leaves else None
        )
        loop = asyncio.get_running_loop()
        counts.open += 1
        try:
            await loop.create_connection(lambda: stream, "127.0.0.1", self._port)
            await asyncio.wait_for(stream.over, 300)
        except (OSError, TimeoutError) as error:
            stream.how = stream.how or f"{type(error).__name__} {error}"
        counts.open -= 1
        self._judge(stream, num_tokens)

    def _judge(self, stream: Stream, num_tokens: int) -> None:
        expected = self._script.text(stream.seed, num_tokens)
        if stream.how == "done":
            kind = "right" if stream.text == expected else "MIXED UP"
        elif stream.how == "left":
            kind = "left" if expected.startswith(stream.text.rstrip("\ufffd")) else "MIXED UP"
        else:
            kind = "LOST"
        if len(stream.ids) > 1:
            kind = "MIXED UP"
        self.counts.ends[kind] += 1
        if kind.isupper() and len(self.counts.samples) < 20:
            self.counts.samples.append(f"seed {stream.seed}: {kind}: {stream.how}")

    async def _probe(self) -> None:
        """Ask for health on a new connection, now and then."""
        while time.monotonic() < self.ends_at:
            began = time.perf_counter()
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            ok = (await reader.read(64)).startswith(b"HTTP/1.1 200")
            self.probes_ms.append(1e3 * (time.perf_counter() - began) if ok else float("inf"))
            writer.close()
            await asyncio.sleep(PROBE_S)

    async def _be_hostile(self) -> None:
        held = []
        while self._options.harm_per_s and time.monotonic() < self.ends_at:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self._port)
                writer.write(self._rng.choice(HARM))
                held.append(writer)
                self.harm += 1
            except OSError:
                pass
            if len(held) > 100:
                held.pop(0).transport.abort()
            await asyncio.sleep(1 / self._options.harm_per_s)
        for writer in held:
            writer.transport.abort()

    async def _sample(self, sample: object) -> None:
        while True:
            assert callable(sample)
            sample(self.counts)
            await asyncio.sleep(SAMPLE_S)


class Watched:
    """The processes of the server."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        first = psutil.Process(process.pid)
        self.processes = [first, *first.children(recursive=True)]
        self.began = time.monotonic()
        self.rows: list[tuple[float, int, int, list[float]]] = []

    def sample(self, counts: Counts) -> None:
        """A row: seconds, streams, tokens, MiB of each process."""
        sizes = [process.memory_info().rss / 2**20 for process in self.processes]
        self.rows.append((time.monotonic() - self.began, counts.open, counts.tokens, sizes))

    @property
    def descriptors(self) -> list[int]:
        return [process.num_fds() for process in self.processes]

    @property
    def names(self) -> list[str]:
        """The first is API process 0."""
        modules = [" ".join(process.cmdline()) for process in self.processes[1:]]
        return ["api 0", *("api 1+" if "server.worker" in each else "engine" for each in modules)]

    def cpu_s(self) -> list[float]:
        return [sum(process.cpu_times()[:2]) for process in self.processes]


@contextmanager
def serving(
    options: argparse.Namespace, log: Path
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    port = free_port()
    command = [sys.executable, "-m", "tetrad", "serve", "--load-format", "null"]
    command += ["--null-step-ms", str(options.null_step_ms), "--port", str(port)]
    command += ["--api-workers", str(options.api_workers)]
    command += ["--max-running-requests", str(options.streams)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        yield port, process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


async def asked(port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return answer.partition(b"\r\n\r\n")[2]


async def until_healthy(port: int, log: Path) -> None:
    for _ in range(600):
        try:
            if await asked(port, "/health") == b"":
                return
        except OSError:
            pass
        await asyncio.sleep(0.1)
    raise SystemExit(log.read_text())


def tell(soak: Soak, watched: Watched, options: argparse.Namespace) -> list[str]:
    """The figures of a run."""
    ends, probes = soak.counts.ends, sorted(soak.probes_ms)
    lines = [f"python benchmarks/soak.py {' '.join(sys.argv[1:])}"]
    lines.append(
        f"{options.streams} streams held for {options.minutes:g} minutes, a step each "
        f"{options.null_step_ms:g} ms, {options.api_workers} API processes, "
        f"{psutil.cpu_count()} processors, of which all that runs here wants "
        f"{psutil.getloadavg()[2]:.1f} (mean of 15 minutes)"
    )
    told = ", ".join(f"{number} {kind}" for kind, number in sorted(ends.items()))
    lines.append(f"streams: {told} (of {ends.total()}); {soak.counts.tokens} tokens")
    lines += soak.counts.samples
    lines.append(f"hostile connections: {soak.harm}")
    lines.append(
        f"/health, {len(probes)} times on new connections: median {statistics.median(probes):.1f} "
        f"ms, 99 % within {probes[int(len(probes) * 0.99)]:.0f} ms, longest {probes[-1]:.0f} ms"
    )
    lines.append("")
    lines.append(f"{'s':>6} {'open':>6} {'tokens':>9}  MiB of {', '.join(watched.names)}")
    for at, num_open, tokens, sizes in watched.rows:
        shown = " ".join(f"{size:7.1f}" for size in sizes)
        lines.append(f"{at:6.0f} {num_open:6} {tokens:9}  {shown}")
    return lines


async def run(options: argparse.Namespace, log: Path) -> list[str]:
    with serving(options, log) as (port, process):
        await until_healthy(port, log)
        watched = Watched(process)
        before = watched.descriptors
        cpu_before = watched.cpu_s()
        soak = Soak(port, options)
        await soak.run(watched.sample)
        cpu_s = [after - b for after, b in zip(watched.cpu_s(), cpu_before, strict=True)]
        await asyncio.sleep(options.idle_s)
        watched.sample(soak.counts)
        state = msgspec.json.decode(await asked(port, "/server_info"))["state"]
        metrics = (await asked(port, "/metrics")).decode().splitlines()
        lines = tell(soak, watched, options)
        lines.append("")
        lines.append(f"CPU s of {', '.join(watched.names)}: {', '.join(f'{s:.0f}' for s in cpu_s)}")
        lines.append(f"descriptors before: {before}, after: {watched.descriptors}")
        lines.append(
            "idle: "
            + ", ".join(
                f"{name} {state[name]}"
                for name in ("integrity", "running_requests", "waiting_requests", "used_pages")
            )
        )
        lines += [line for line in metrics if line.startswith("tetrad_open_requests ")]
        process.terminate()
        lines.append(f"SIGTERM: exit code {process.wait(60)}")
        bad = [line for line in log.read_text().splitlines() if "ERROR" in line or "Trace" in line]
        lines.append(f"errors in the log: {len(bad)}")
        return lines + bad[:20]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=2048)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--leave", type=float, default=0.3)
    parser.add_argument("--null-step-ms", type=float, default=400)
    parser.add_argument("--api-workers", type=int, default=2)
    parser.add_argument("--harm-per-s", type=float, default=2)
    parser.add_argument("--idle-s", type=float, default=30)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 3 * options.streams)), hard))
    with tempfile.TemporaryDirectory() as folder:
        lines = uvloop.run(run(options, Path(folder) / "log"))
    text = "\n".join(lines) + "\n"
    print(text)
    if options.output is not None:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
