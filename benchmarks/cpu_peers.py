"""One small model on a CPU, served by several servers, measured by turns in one run.

    python benchmarks/cpu_peers.py tetrad=30123:PID llama.cpp=30124:PID vllm=30125:PID

Servers run already; PID is the first process of each, whose children are counted too. A round asks
every server in turn, with so many requests at once: 60 words in, 64 tokens out, greedy, end tokens
ignored, streamed from /v1/completions. Beside the throughput stands what depends less on who else
uses the machine: the processor time that the server took for a token, of its first process, which
is the front end where the model runs in another, and of its children. With a model that is next to
nothing (--model tiny --streams 1,64) the servers themselves are compared.

A server may be busy for a while after its last answer, so there is a pause between measurements.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from dataclasses import dataclass, field

import aiohttp
import msgspec
import psutil

TEXT = """the of and to in a is that for it as was with be by on not he his but at are this have
from or had an they which one you were all her she there would their we him been has when who will
no more if out so up said what its about than into them can only other time new some could"""
WORDS = TEXT.split()
OUTPUT_TOKENS = 64


@dataclass
class Server:
    """One of them, and what each round gave."""

    name: str
    port: int
    pid: int
    rates: dict[int, list[float]] = field(default_factory=dict)
    first_ms: dict[int, list[float]] = field(default_factory=dict)
    """Processor time of the first process for a token."""
    children_ms: dict[int, list[float]] = field(default_factory=dict)
    ttft_ms: dict[int, list[float]] = field(default_factory=dict)

    def cpu_s(self) -> tuple[float, float]:
        """Of the process, and of its children."""
        first = psutil.Process(self.pid)
        return _cpu_s(first), sum(map(_cpu_s, first.children(recursive=True)))


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def stream(session: aiohttp.ClientSession, port: int, model: str) -> tuple[int, float]:
    """Tokens that the server counted, and seconds to the first."""
    started, first = time.perf_counter(), 0.0
    body = {
        "model": model,
        "prompt": " ".join(random.choices(WORDS, k=60)),
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    tokens = 0
    async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event = msgspec.json.decode(line[6:])
            first = first or (time.perf_counter() - started if event.get("choices") else 0.0)
            tokens = (event.get("usage") or {}).get("completion_tokens") or tokens
    if tokens != OUTPUT_TOKENS:
        raise SystemExit(f"port {port} gave {tokens} tokens of {OUTPUT_TOKENS}")
    return tokens, first


async def measure(server: Server, model: str, streams: int) -> None:
    """One server, so many requests at once."""
    async with aiohttp.ClientSession() as session:
        before, started = server.cpu_s(), time.perf_counter()
        calls = [stream(session, server.port, model) for _ in range(streams)]
        answers = await asyncio.gather(*calls)
        spent = time.perf_counter() - started
        tokens = sum(count for count, _ in answers)
        server.rates.setdefault(streams, []).append(tokens / spent)
        kept = (server.first_ms, server.children_ms)
        for part, start, end in zip(kept, before, server.cpu_s(), strict=True):
            part.setdefault(streams, []).append(1e3 * (end - start) / tokens)
        first = statistics.fmean(seconds for _, seconds in answers)
        server.ttft_ms.setdefault(streams, []).append(1e3 * first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("servers", nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause", type=float, default=3.0, help="seconds between two measurements")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", default="1,8", help="requests at once")
    options = parser.parse_args()
    servers = []
    for text in options.servers:
        name, _, place = text.partition("=")
        port, _, pid = place.partition(":")
        servers.append(Server(name, int(port), int(pid)))
    counts = [int(part) for part in options.streams.split(",")]
    for number in range(options.rounds):
        for streams in counts:
            for server in servers if number % 2 == 0 else reversed(servers):
                asyncio.run(measure(server, options.model, streams))
                time.sleep(options.pause)
        told = "  ".join(
            " ".join([s.name, *(f"{s.rates[streams][-1]:.1f}" for streams in counts)])
            for s in servers
        )
        print(f"round {number + 1}, load {os.getloadavg()[0]:.1f}: {told} tok/s", flush=True)
    for streams in counts:
        print(f"{streams} at once, medians of {options.rounds} rounds (least to greatest)")
        for server in servers:
            print(f"  {server.name:10} {line(server, streams)}")


def line(server: Server, streams: int) -> str:
    """What all rounds gave."""
    rates = server.rates[streams]
    return (
        f"{statistics.median(rates):8.1f} tok/s ({min(rates):.1f} to {max(rates):.1f}), TTFT "
        f"{statistics.median(server.ttft_ms[streams]):.0f} ms, processor time a token: first "
        f"process {statistics.median(server.first_ms[streams]):.3f} ms, children "
        f"{statistics.median(server.children_ms[streams]):.3f} ms"
    )


if __name__ == "__main__":
    main()
