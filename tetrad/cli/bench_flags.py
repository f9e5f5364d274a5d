"""Flags of `sglang.bench_serving`: which of them `tetrad bench serve` goes without, and why.

A pasted command line stops at the first of these; the reason says what to do instead. Abbreviations
mean what they mean there: one that begins a single flag of SGLang is that flag.
"""

from __future__ import annotations

_TEXT = "this benchmark sends text; leave it out, or measure images with sglang.bench_serving"
_PROFILE = (
    "a profiled run is not a measurement; POST /start_profile to the server in a run of its own, "
    "or see `tetrad bench rank`"
)
_LORA = (
    "on a server with adapters name one with --extra-request-body '{\"lora_path\": NAME}'; Tetrad "
    "has none"
)
_CLIENT = (
    "there is one client, which keeps bytes during the run and reads them after it; leave it out"
)

REASONS = {
    "--agentic-max-turns": "there is no agentic-trace dataset; --dataset-name custom with turns "
    "plays conversations",
    "--speed-bench-category": "nothing is downloaded; give the prompts with --dataset-name custom",
    "--speed-bench-output-len": "nothing is downloaded; give the prompts with --dataset-name "
    "custom, and --sharegpt-output-len",
    "--image-count": _TEXT,
    "--image-resolution": _TEXT,
    "--random-image-count": _TEXT,
    "--image-format": _TEXT,
    "--image-content": _TEXT,
    "--print-requests": "printing takes the client's time; --output-details with --output-file "
    "writes every request after the run",
    "--profile": _PROFILE,
    "--profile-activities": _PROFILE,
    "--profile-start-step": _PROFILE,
    "--profile-steps": _PROFILE,
    "--profile-num-steps": _PROFILE,
    "--profile-by-stage": _PROFILE,
    "--profile-stages": _PROFILE,
    "--profile-output-dir": _PROFILE,
    "--profile-prefix": _PROFILE,
    "--profile-prefill-url": _PROFILE,
    "--profile-decode-url": _PROFILE,
    "--pd-separated": "it only tells the profiler where to go; leave it out",
    "--plot-throughput": "no plot is drawn in the terminal; --output-details with --output-file "
    "has the times",
    "--lora-name": _LORA,
    "--lora-request-distribution": _LORA,
    "--lora-zipf-alpha": _LORA,
    "--gsp-fast-prepare": "lengths are known as prompts are drawn, so there is nothing to skip; "
    "leave it out",
    "--gsp-send-routing-key": "every request has the same headers, and prefixes route by content; "
    "leave it out",
    "--mooncake-workload": "nothing is downloaded; give the trace with --dataset-path",
    "--fake-prefill": "a run without prefill does not measure a server; leave it out",
    "--rust-client": _CLIENT,
    "--rust-worker-threads": "--workers sets the number of load processes",
}
"""Flag of `sglang.bench_serving` → why there is none."""

ACCEPTED = (
    *("--backend", "--base-url", "--host", "--port", "--ready-check-timeout-sec"),
    *("--dataset-name", "--dataset-path", "--dataset-offset"),
    *("--model", "--served-model-name", "--tokenizer", "--num-prompts"),
    *("--sharegpt-output-len", "--sharegpt-context-len"),
    *("--random-input-len", "--random-output-len", "--random-range-ratio"),
    *("--request-rate", "--use-trace-timestamps", "--max-concurrency"),
    *("--output-file", "--output-details", "--disable-tqdm", "--disable-stream"),
    *("--return-logprob", "--top-logprobs-num", "--token-ids-logprob", "--logprob-start-len"),
    *("--return-routed-experts", "--cache-report", "--seed", "--disable-ignore-eos"),
    *("--temperature", "--top-p", "--extra-request-body", "--apply-chat-template"),
    *("--prompt-suffix", "--flush-cache", "--flush-cache-timeout", "--warmup-requests"),
    *("--tokenize-prompt", "--gsp-num-groups", "--gsp-prompts-per-group"),
    *("--gsp-system-prompt-len", "--gsp-question-len", "--gsp-output-len", "--gsp-range-ratio"),
    *("--gsp-num-turns", "--gsp-ordered", "--gsp-group-distribution", "--gsp-zipf-alpha"),
    *("--mooncake-slowdown-factor", "--mooncake-num-rounds", "--goodput", "--tag", "--header"),
)
"""The flags of `sglang.bench_serving` that mean the same here."""


def full_name(short: str) -> str | None:
    """The flag of `sglang.bench_serving` that `short` names or abbreviates; None when there is no
    such flag, or more than one."""
    flags = (*ACCEPTED, *REASONS)
    if short in flags:
        return short
    longer = [flag for flag in flags if flag.startswith(short)]
    return longer[0] if len(longer) == 1 else None


def reason(flag: str) -> str | None:
    """Why `tetrad bench serve` has no such flag, or None when it is not SGLang's."""
    return REASONS.get(full_name(flag) or "")
