"""How far load generators are from the truth, and what a token costs them.

The truth is `paced_server.c`, built here with `cc`: every stream gets one token a step, all at the
same instants, and the server tells when it sent what. Each client runs on cores of its own, twice a
round, with few requests and with many: the difference of the two CPU times over the difference of
tokens is its cost per token, without its start. Clients take turns over the rounds. On a machine
that others use, the server's steps are late at times: what was measured then is measured again.

    python benchmarks/client_bias.py --streams 256,1024,2048 --rounds 3
    python benchmarks/client_bias.py --streams 4096 --client-cores 1,2
    python benchmarks/client_bias.py --peers ENVIRONMENTS --tokenizer FOLDER

Peers are programs of environments of their own, `ENVIRONMENTS/sglang`, `vllm`, `aiperf` and
`guidellm`, of which any may be missing; `client_peers.py` says how each is installed. They want the
folder of a tokenizer, such as `tetrad/data/abacus`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from client_peers import INSTALL, PEERS, Client, Load, Reported, Unusable, reported, run

HERE = Path(__file__).resolve().parent
STEPS_MANY = 3
"""The larger run has so many times the requests of the smaller one."""


def tetrad(load: Load, cores: list[int]) -> Reported:
    """Ours, with a file of prompts. Its exit code 6 is an INVALID run, which is a result here."""
    prompts, result = load.folder / "prompts.jsonl", load.folder / "tetrad.jsonl"
    line = json.dumps({"prompt": "a " * 128, "output_len": load.output_tokens})
    prompts.write_text(f"{line}\n" * load.requests)
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tetrad", "bench", "serve", "--backend", "vllm"]
    command += ["--base-url", load.url, "--dataset-name", "custom", "--dataset-path", str(prompts)]
    command += ["--max-concurrency", str(load.streams), "--workers", str(len(cores))]
    command += ["--warmup-requests", "0", "--output-file", str(result), "--disable-tqdm"]
    # The paced server tells nothing of itself, and its machine's GPUs have nothing to do.
    command += ["--disable-telemetry"]
    cpu_s = run(command, cores, ok=(0, 6))
    said = json.loads(result.read_text())
    client = said["tetrad"]["client"]
    verdict = "INVALID" if client["invalid"] else "valid"
    verdict += f", {client['us_per_token']:.1f} us/token by itself"
    if said["failed"]:
        verdict += f", {said['failed']} failed"
    return reported(said, cpu_s, verdict)


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
    late_ms: float
    """How late the server's steps were on average: its own error, and the machine's noise."""
    pacing: str
    verdict: str


def measured(client: Client, load: Load, cores: list[int]) -> Row:
    """Few requests, then many; bias is that of the larger run."""
    few = client(load, cores)
    many = Load(**{**load.__dict__, "requests": load.requests * STEPS_MANY})
    asked(load.url, "/reset", "POST")
    said = client(many, cores)
    truth = asked(load.url, f"/truth?last={many.requests}")
    more_tokens = (many.requests - load.requests) * load.output_tokens
    return Row(
        throughput_bias=said.output_throughput / (truth["tokens"] / truth["span_s"]) - 1,
        ttft_bias_ms=said.mean_ttft_ms - truth["mean_ttft_ms"],
        tpot_bias=said.mean_tpot_ms / truth["mean_tpot_ms"] - 1,
        us_per_token=(said.cpu_s - few.cpu_s) / more_tokens * 1e6,
        late_ms=truth["late_mean_ms"],
        pacing=(
            f"late {truth['late_mean_ms']:.2f} (max {truth['late_max_ms']:.1f}), "
            f"burst {truth['drain_mean_ms']:.1f} (max {truth['drain_max_ms']:.1f}), "
            f"load {os.getloadavg()[0]:.1f}"
        ),
        verdict=said.verdict,
    )


def median(values: Iterator[float]) -> float:
    return statistics.median(values)


def show(name: str, streams: int, rows: list[Row], most_late_ms: float) -> str:
    """A line of the table: medians over the rounds."""
    worst = max(abs(row.throughput_bias) for row in rows)
    late = "" if all(row.late_ms <= most_late_ms for row in rows) else "SERVER LATE "
    return (
        f"{name:<8} {streams:>7} {median(r.throughput_bias for r in rows):>+10.2%} "
        f"{worst:>9.2%} {median(r.ttft_bias_ms for r in rows):>+9.1f} "
        f"{median(r.tpot_bias for r in rows):>+8.2%} {median(r.us_per_token for r in rows):>8.1f}  "
        f"{rows[-1].pacing}  {late}{rows[-1].verdict}"
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
    parser.add_argument("--most-late-ms", type=float, default=3.0, help="of the server, on average")
    parser.add_argument("--tries", type=int, default=3, help="to keep --most-late-ms")
    parser.add_argument("--peers", type=Path, help="folder of the peers' environments")
    parser.add_argument("--only", help="names of clients, by commas; default: all that are there")
    parser.add_argument("--tokenizer", help="folder of a tokenizer, for the peers")
    return parser.parse_args()


def chosen(options: argparse.Namespace) -> dict[str, Client]:
    """Our client and the peers that are there; those that are not are named."""
    clients: dict[str, Client] = {"tetrad": tetrad}
    for name, (program, client) in PEERS.items() if options.peers else ():
        path = options.peers.resolve() / name / "bin" / program
        if path.exists():
            clients[name] = client(str(path))
        else:
            print(f"{name}: there is no {path}; install it with: {INSTALL[name]}")
    only = options.only.split(",") if options.only else list(clients)
    return {name: client for name, client in clients.items() if name in only}


def in_time(client: Client, streams: int, options: argparse.Namespace) -> Row:
    """The first measurement in which the server was in time, or the last one that was tried."""
    cores = [int(core) for core in options.client_cores.split(",")]
    for attempt in range(1, options.tries + 1):
        # A server of its own for each: what one left behind is not the next one's.
        with (
            tempfile.TemporaryDirectory() as name,
            paced_server(Path(name), options.server_core, options.step_ms, options.ttft_ms) as url,
        ):
            load = Load(
                url=url,
                streams=streams,
                requests=streams,
                output_tokens=options.output_tokens,
                folder=Path(name),
                tokenizer=options.tokenizer,
            )
            row = measured(client, load, cores)
        if row.late_ms <= options.most_late_ms or attempt == options.tries:
            return row
    raise AssertionError("--tries must be above 0")


def main() -> None:
    options = parsed()
    clients = chosen(options)
    print(
        f"{'client':<8} {'streams':>7} {'throughput':>10} {'worst':>9} {'TTFT ms':>9} {'TPOT':>8} "
        f"{'us/token':>8}  the server's own error, ms; the machine's load"
    )
    for streams in (int(number) for number in options.streams.split(",")):
        rows: dict[str, list[Row]] = {client: [] for client in clients}
        for turn in range(options.rounds):
            order = list(clients) if turn % 2 == 0 else list(clients)[::-1]
            for client in order:
                try:
                    row = in_time(clients[client], streams, options)
                except Unusable as error:
                    del clients[client]
                    print(f"{client}: {error}", flush=True)
                else:
                    rows[client].append(row)
                    print(show(client, streams, [row], options.most_late_ms), file=sys.stderr)
        for client, of_client in rows.items():
            if of_client:
                print(show(client, streams, of_client, options.most_late_ms), flush=True)


if __name__ == "__main__":
    main()
