"""What serving costs beside the model: Tetrad with its null engine against a bare Starlette route.

Each server runs once for each number of streams, on one core beside the load generator's own or on
two that they share. The null engine hands out scripted tokens; at `--rate-step-ms` a step the front
end is the limit, at `--pace-step-ms` it has time, and what a first token takes more at many streams
than at few is what it adds.

    python benchmarks/front_end.py --streams 64,512,2048 --output front_end.txt
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tetrad.cli.child import free_port
from tetrad.data import embedded_model

HERE = Path(__file__).resolve().parent
PATIENCE_S = 60.0
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 128
FEW = 8
PYTHON = sys.executable
TETRAD = [PYTHON, "-m", "tetrad"]


@dataclass(frozen=True)
class Layout:
    """Which cores everybody may use."""

    name: str
    server: tuple[int, ...]
    client: tuple[int, ...]


LAYOUTS = {
    "1": Layout("server on one core, client on another", (0,), (1,)),
    "2": Layout("server and client share two cores", (0, 1), (0, 1)),
}


@dataclass(frozen=True)
class Row:
    """One run."""

    tok_per_s: float
    median_ttft_ms: float
    cpu_us: dict[str, float]
    """Process → CPU microseconds of it for a streamed token."""
    num_failed: int


class Server:
    """A running server and its processes."""

    def __init__(self, url: str, process: psutil.Process) -> None:
        self.url = url
        self._process = process

    def cpu_s(self) -> dict[str, float]:
        """Seconds that its processes have computed, the front end and what it started."""
        spent = {"API": _cpu_s(self._process), "engine": 0.0}
        for child in self._process.children(recursive=True):
            spent["engine"] += _cpu_s(child)
        return spent


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextmanager
def started(command: Sequence[str], port: int, layout: Layout) -> Iterator[Server]:
    """Start a server and wait until it is healthy; end it afterwards."""
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            preexec_fn=lambda: os.sched_setaffinity(0, layout.server),
        )
        try:
            _wait(url, process)
            yield Server(url, psutil.Process(process.pid))
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=1).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
        else:
            return
    raise SystemExit(f"{url} did not come up; the command was {process.args!r}")


def bare(port: int) -> list[str]:
    """The command of the bare route."""
    return [
        PYTHON, "-m", "uvicorn", "bare_route:app", "--app-dir", str(HERE), "--port", str(port),
        "--loop", "uvloop", "--http", "httptools", "--no-access-log", "--log-level", "warning",
    ]  # fmt: skip


def null(port: int, step_ms: float, most: int) -> list[str]:
    """The command of Tetrad without a model."""
    return [
        *TETRAD, "serve", "glm-5", "--load-format", "null", "--null-step-ms", str(step_ms),
        "--max-running-requests", str(most), "--context-length", "4096", "--port", str(port),
    ]  # fmt: skip


def measured(server: Server, load: Sequence[str], requests: int, layout: Layout) -> Row:
    """A load of `tetrad bench serve`, beside what the server computed."""
    before = server.cpu_s()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.jsonl"
        command = [
            *TETRAD, "bench", "serve", "--backend", "vllm", "--base-url", server.url,
            "--dataset-name", "random-ids", "--tokenizer", str(embedded_model()),
            "--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS),
            "--random-range-ratio", "1", *load, "--num-prompts", str(requests),
            "--warmup-requests", "1", "--disable-tqdm",
            "--disable-telemetry", "--output-file", str(result),
        ]  # fmt: skip
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=lambda: os.sched_setaffinity(0, layout.client),
        )
        if not result.exists():
            raise SystemExit(f"tetrad bench serve said: {(done.stdout + done.stderr)[-600:]}")
        said = json.loads(result.read_text().splitlines()[-1])
    after = server.cpu_s()
    num_tokens = (requests + 1) * OUTPUT_TOKENS
    cpu_us = {name: 1e6 * (after[name] - before[name]) / num_tokens for name in after}
    failed = requests - int(said["completed"])
    return Row(said["output_throughput"], said["median_ttft_ms"], cpu_us, failed)


def rates(streams: int, layout: Layout, options: argparse.Namespace) -> str:
    """A line: how much faster the bare route is, in the same minute."""
    requests, load = max(streams, options.requests), ["--max-concurrency", str(streams)]
    port = free_port()
    with started(bare(port), port, layout) as server:
        plain = measured(server, load, requests, layout)
    port = free_port()
    with started(null(port, options.rate_step_ms, streams), port, layout) as server:
        ours = measured(server, load, requests, layout)
    failed = plain.num_failed + ours.num_failed
    return (
        f"{streams:8} {plain.tok_per_s:11,.0f} {plain.cpu_us['API']:8.1f} {ours.tok_per_s:11,.0f} "
        f"{100 * ours.tok_per_s / plain.tok_per_s:6.0f} % {ours.cpu_us['API']:8.1f} "
        f"{ours.cpu_us['engine']:8.1f}" + (f"  {failed} requests failed" if failed else "")
    )


def added_ttft(streams: int, layout: Layout, options: argparse.Namespace) -> str:
    """A line: the median first token where FEW streams are open and where so many are.

    They arrive at random, as many a second as end; in a closed loop all would come at once. With
    FEW the engine is hardly ever idle, so that who comes waits as long for the step under way.
    """
    port = free_port()
    with started(null(port, options.pace_step_ms, 2 * streams), port, layout) as server:
        few, many = (
            measured(server, ["--request-rate", f"{rate:g}", "--seed", "1"], requests, layout)
            for rate, requests in (
                (open_ / (OUTPUT_TOKENS * options.pace_step_ms * 1e-3), max(40, 3 * open_))
                for open_ in (FEW, streams)
            )
        )
    added = many.median_ttft_ms - few.median_ttft_ms
    return (
        f"{streams:8} {few.median_ttft_ms:10.1f} {many.median_ttft_ms:10.1f} {added:10.1f} "
        f"{many.tok_per_s:11,.0f}"
    )


def report(options: argparse.Namespace) -> Iterator[str]:
    """Line by line."""
    yield f"{PROMPT_TOKENS} tokens in and {OUTPUT_TOKENS} out, {options.requests} requests or as"
    yield "many as streams; CPU is microseconds of a process for a streamed token"
    for key in options.cores.split(","):
        layout = LAYOUTS[key]
        yield f"\n{layout.name}"
        yield " streams  bare tok/s  API CPU  null tok/s    share  API CPU   engine"
        for streams in options.streams:
            yield rates(streams, layout, options)
    layout = LAYOUTS["2"]
    yield f"\na step of {options.pace_step_ms:g} ms, {layout.name}: median time to first token, ms"
    yield f" streams      at {FEW}     at all      added       tok/s"
    for streams in options.paced_streams or [few for few in options.streams if few <= 512]:
        yield added_ttft(streams, layout, options)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--streams", type=numbers, default=[64, 512, 2048])
    parser.add_argument("--paced-streams", type=numbers, help="those of --streams up to 512")
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--cores", default="1,2", help="1, 2 or both")
    parser.add_argument("--rate-step-ms", type=float, default=0.5)
    parser.add_argument("--pace-step-ms", type=float, default=40.0)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def main() -> None:
    """Print the report as it comes, and keep it."""
    options = parsed()
    kept = []
    for text in report(options):
        print(text, flush=True)
        kept.append(text)
    if options.output:
        options.output.write_text("\n".join(kept) + "\n")


if __name__ == "__main__":
    main()
