"""One small model on a CPU, served by several servers, measured by turns in one run.

    python benchmarks/cpu_peers.py tetrad=30123:PID llama.cpp=30124:PID vllm=30125:PID

Servers run already; PID is the first process of each, whose children are counted too. A round asks
every server in turn, first one request at a time, then eight at once: 60 words in, 64 tokens out,
greedy, end tokens ignored, streamed from /v1/completions. Beside the throughput stands what depends
less on who else uses the machine: the processor time that the server took for a token.
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
STREAMS = {1: 1, 8: 8}
"""Requests at once → requests of a round."""


@dataclass
class Server:
    """One of them, and what each round gave."""

    name: str
    port: int
    pid: int
    rates: dict[int, list[float]] = field(default_factory=dict)
    cpu_ms: dict[int, list[float]] = field(default_factory=dict)
    ttft_ms: dict[int, list[float]] = field(default_factory=dict)

    def cpu_s(self) -> float:
        """Of the process and its children."""
        first = psutil.Process(self.pid)
        times = [p.cpu_times() for p in (first, *first.children(recursive=True))]
        return sum(each.user + each.system for each in times)


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
        calls = [stream(session, server.port, model) for _ in range(STREAMS[streams])]
        answers = await asyncio.gather(*calls)
        spent = time.perf_counter() - started
        tokens = sum(count for count, _ in answers)
        server.rates.setdefault(streams, []).append(tokens / spent)
        cpu_ms = 1e3 * (server.cpu_s() - before) / tokens
        server.cpu_ms.setdefault(streams, []).append(cpu_ms)
        first = statistics.fmean(seconds for _, seconds in answers)
        server.ttft_ms.setdefault(streams, []).append(1e3 * first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("servers", nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two measurements")
    parser.add_argument("--model", default="smollm2")
    options = parser.parse_args()
    servers = []
    for text in options.servers:
        name, _, place = text.partition("=")
        port, _, pid = place.partition(":")
        servers.append(Server(name, int(port), int(pid)))
    for number in range(options.rounds):
        for streams in STREAMS:
            for server in servers if number % 2 == 0 else reversed(servers):
                asyncio.run(measure(server, options.model, streams))
                time.sleep(options.pause)
        told = "  ".join(f"{s.name} {s.rates[1][-1]:.1f} {s.rates[8][-1]:.1f}" for s in servers)
        print(f"round {number + 1}, load {os.getloadavg()[0]:.1f}: {told} tok/s", flush=True)
    for streams in STREAMS:
        print(f"{streams} at once, medians of {options.rounds} rounds (least to greatest)")
        for server in servers:
            rates = server.rates[streams]
            print(
                f"  {server.name:10} {statistics.median(rates):7.1f} tok/s "
                f"({min(rates):.1f} to {max(rates):.1f}), TTFT "
                f"{statistics.median(server.ttft_ms[streams]):.0f} ms, processor time "
                f"{statistics.median(server.cpu_ms[streams]):.1f} ms a token "
                f"({min(server.cpu_ms[streams]):.1f} to {max(server.cpu_ms[streams]):.1f})"
            )


if __name__ == "__main__":
    main()
