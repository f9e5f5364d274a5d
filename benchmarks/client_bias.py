"""How far load generators are from the truth, and what a token costs them.

The truth is `paced_server.c`, built here with `cc`: every stream gets one token a step, all at the
same instants, and the server tells when it sent what. Each client runs on cores of its own, twice a
round, with few requests and with many: the difference of the two CPU times over the difference of
tokens is its cost per token, without its start. Clients take turns over the rounds.

    python benchmarks/client_bias.py --streams 256,1024,2048 --rounds 3
    python benchmarks/client_bias.py --peer sglang=~/sglang-env/bin/python \
        --peer vllm=~/vllm-env/bin/vllm --tokenizer FOLDER

Peers are programs of their own environments: `sglang=PYTHON`, which runs `sglang_client.py` beside
this file, and `vllm=VLLM`, which runs `vllm bench serve`. Both want the folder of a tokenizer.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STEPS_MANY = 3
"""The larger run has so many times the requests of the smaller one."""


@dataclass(frozen=True)
class Load:
    """One run: closed loop, all lengths fixed."""

    url: str
    streams: int
    requests: int
    output_tokens: int
    folder: Path
    tokenizer: str | None


@dataclass(frozen=True)
class Reported:
    """What a client says, and what it used."""

    output_throughput: float
    mean_ttft_ms: float
    mean_tpot_ms: float
    cpu_s: float
    verdict: str = ""


Client = Callable[[Load, list[int]], Reported]


def run(command: list[str], cores: list[int], ok: tuple[int, ...] = (0,)) -> float:
    """CPU seconds of a command that may use `cores` only; its output goes to stderr if it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
        check=False,
    )
    if done.returncode not in ok:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def tetrad(load: Load, cores: list[int]) -> Reported:
    """Ours, with a file of prompts. Its exit code 6 is an INVALID run, which is a result here."""
    prompts, result = load.folder / "prompts.jsonl", load.folder / "tetrad.jsonl"
    line = json.dumps({"prompt": "a " * 128, "output_len": load.output_tokens})
    prompts.write_text(f"{line}\n" * load.requests)
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tetrad.cli.main", "bench", "serve", "--backend", "vllm"]
    command += ["--base-url", load.url, "--dataset-name", "custom", "--dataset-path", str(prompts)]
    command += ["--max-concurrency", str(load.streams), "--workers", str(len(cores))]
    command += ["--warmup-requests", "0", "--output-file", str(result), "--disable-tqdm"]
    cpu_s = run(command, cores, ok=(0, 6))
    said = json.loads(result.read_text())
    client = said["tetrad"]["client"]
    verdict = "INVALID" if client["invalid"] else "valid"
    verdict += f", {client['us_per_token']:.1f} us/token by itself"
    if said["failed"]:
        verdict += f", {said['failed']} failed"
    return reported(said, cpu_s, verdict)


def sglang(python: str) -> Client:
    """`sglang.bench_serving`, native API aside: the same route as the others."""

    def client(load: Load, cores: list[int]) -> Reported:
        result = load.folder / "sglang.jsonl"
        result.unlink(missing_ok=True)
        command = [python, str(HERE / "sglang_client.py"), "--backend", "vllm", "--model", "paced"]
        command += ["--base-url", load.url, "--dataset-name", "random-ids", *lengths(load)]
        command += ["--tokenizer", load.tokenizer or "", "--max-concurrency", str(load.streams)]
        # 1 is a fixed length here; for vLLM that is its default, 0.
        command += ["--random-range-ratio", "1.0"]
        command += ["--output-file", str(result), "--disable-tqdm"]
        cpu_s = run(command, cores)
        return reported(json.loads(result.read_text()), cpu_s)

    return client


def vllm(program: str) -> Client:
    """`vllm bench serve`."""

    def client(load: Load, cores: list[int]) -> Reported:
        command = [program, "bench", "serve", "--backend", "openai", "--model", "paced"]
        command += ["--base-url", load.url, "--dataset-name", "random", *lengths(load)]
        command += ["--tokenizer", load.tokenizer or "", "--max-concurrency", str(load.streams)]
        command += ["--save-result", "--result-dir", str(load.folder), "--disable-tqdm"]
        command += ["--result-filename", "vllm.json", "--ignore-eos"]
        cpu_s = run(command, cores)
        return reported(json.loads((load.folder / "vllm.json").read_text()), cpu_s)

    return client


def lengths(load: Load) -> list[str]:
    """The shape of a load in the flags that both peers share."""
    return [
        *("--num-prompts", str(load.requests), "--random-input-len", "128"),
        *("--random-output-len", str(load.output_tokens)),
    ]


def reported(said: dict[str, Any], cpu_s: float, verdict: str = "") -> Reported:
    """The figures under the names that all three use."""
    names = ("output_throughput", "mean_ttft_ms", "mean_tpot_ms")
    throughput, ttft_ms, tpot_ms = (float(said[name]) for name in names)
    return Reported(throughput, ttft_ms, tpot_ms, cpu_s, verdict)


PEERS: dict[str, Callable[[str], Client]] = {"sglang": sglang, "vllm": vllm}


def asked(url: str, path: str, method: str = "GET") -> dict[str, Any]:
    """The server's own account."""
    request = urllib.request.Request(url + path, method=method)
    with urllib.request.urlopen(request) as answer:
        return dict(json.load(answer))


@contextmanager
def paced_server(folder: Path, core: int, step_ms: float, ttft_ms: float) -> Iterator[str]:
    """Build it, start it on a core of its own, give its address."""
    program = folder / "paced_server"
    subprocess.run(["cc", "-O2", "-o", program, HERE / "paced_server.c"], check=True)
    with subprocess.Popen(
        [program, "0", str(step_ms), str(ttft_ms)],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, [core]),
    ) as server:
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


@dataclass(frozen=True)
class Row:
    """One client at one load in one round."""

    throughput_bias: float
    ttft_bias_ms: float
    tpot_bias: float
    us_per_token: float
    pacing: str
    verdict: str


def measured(client: Client, load: Load, cores: list[int]) -> Row:
    """Few requests, then many; bias is that of the larger run."""
    few = client(load, cores)
    many = Load(**{**load.__dict__, "requests": load.requests * STEPS_MANY})
    asked(load.url, "/reset", "POST")
    said = client(many, cores)
    truth = asked(load.url, "/truth")
    more_tokens = (many.requests - load.requests) * load.output_tokens
    # What the server sent, over the time from the first request to its last token.
    span_s = truth["last_s"] - truth["first_s"] + truth["mean_ttft_ms"] / 1e3
    return Row(
        throughput_bias=said.output_throughput / (truth["tokens"] / span_s) - 1,
        ttft_bias_ms=said.mean_ttft_ms - truth["mean_ttft_ms"],
        tpot_bias=said.mean_tpot_ms / truth["mean_tpot_ms"] - 1,
        us_per_token=(said.cpu_s - few.cpu_s) / more_tokens * 1e6,
        pacing=(
            f"late {truth['late_mean_ms']:.2f} (max {truth['late_max_ms']:.1f}), "
            f"burst {truth['drain_mean_ms']:.1f} (max {truth['drain_max_ms']:.1f})"
        ),
        verdict=said.verdict,
    )


def median(values: Iterator[float]) -> float:
    return statistics.median(values)


def show(name: str, streams: int, rows: list[Row]) -> str:
    """A line of the table: medians over the rounds."""
    worst = max(abs(row.throughput_bias) for row in rows)
    return (
        f"{name:<8} {streams:>7} {median(r.throughput_bias for r in rows):>+10.2%} "
        f"{worst:>9.2%} {median(r.ttft_bias_ms for r in rows):>+9.1f} "
        f"{median(r.tpot_bias for r in rows):>+8.2%} {median(r.us_per_token for r in rows):>8.1f}  "
        f"{rows[-1].pacing}  {rows[-1].verdict}"
    )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Bias and cost of load generators.")
    parser.add_argument("--streams", default="256,1024,2048", help="requests in flight, by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=20.0, help="between tokens")
    parser.add_argument("--ttft-ms", type=float, default=1000.0, help="before the first token")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--server-core", type=int, default=0)
    parser.add_argument("--client-cores", default="1", help="by commas; one process each")
    parser.add_argument("--peer", action="append", default=[], help="NAME=PROGRAM")
    parser.add_argument("--tokenizer", help="folder of a tokenizer, for the peers")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    clients: dict[str, Client] = {"tetrad": tetrad}
    for peer in options.peer:
        name, _, program = peer.partition("=")
        clients[name] = PEERS[name](os.path.expanduser(program))
    cores = [int(core) for core in options.client_cores.split(",")]
    print(
        f"{'client':<8} {'streams':>7} {'throughput':>10} {'worst':>9} {'TTFT ms':>9} {'TPOT':>8} "
        f"{'us/token':>8}  the server's own error, ms"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for streams in (int(number) for number in options.streams.split(",")):
            rows: dict[str, list[Row]] = {client: [] for client in clients}
            for turn in range(options.rounds):
                order = list(clients) if turn % 2 == 0 else list(clients)[::-1]
                for client in order:
                    # A server of its own for each: what one left behind is not the next one's.
                    with paced_server(
                        folder, options.server_core, options.step_ms, options.ttft_ms
                    ) as url:
                        load = Load(
                            url=url,
                            streams=streams,
                            requests=streams,
                            output_tokens=options.output_tokens,
                            folder=folder,
                            tokenizer=options.tokenizer,
                        )
                        rows[client].append(measured(clients[client], load, cores))
            for client, of_client in rows.items():
                print(show(client, streams, of_client), flush=True)


if __name__ == "__main__":
    main()
