"""Flags of SGLang's launch scripts that `tetrad serve` does without, each with the reason.

A script that is carried over stops at the first of them; the reason says whether leaving it out
changes anything.
"""

from __future__ import annotations

REASONS = {
    "--trust-remote-code": "no code in a model folder is run; leave it out",
    "--tokenizer-": "the tokenizer is the model folder's; leave it out",
    "--page-size": "a page always has 64 tokens; leave it out",
    "--max-prefill-tokens": "--chunked-prefill-size is the token budget of a step",
    "--enable-mixed-chunk": "prompts and running requests always share a step; leave it out",
    "--disable-cuda-graph-padding": "--cuda-graph-bs lists the sizes that need none; leave it out",
    "--enable-metrics": "/metrics is always there; leave it out",
    "--speculative-": "this version does not speculate; without it answers are the same, later",
    "--dp": "this version runs on one device; leave it out",
    "--data-parallel-size": "this version runs on one device; leave it out",
    "--enable-dp-": "this version runs on one device; leave it out",
    "--ep": "this version runs on one device; leave it out",
    "--expert-parallel-size": "this version runs on one device; leave it out",
    "--pp": "this version runs on one device; leave it out",
    "--pipeline-parallel-size": "this version runs on one device; leave it out",
    "--moe-a2a-backend": "this version runs on one device; leave it out",
    "--nnodes": "this version runs on one device; leave it out",
    "--dist-": "this version runs on one device; leave it out",
    "--disaggregation-": "one process computes prompts and answers; leave it out",
    "--load-balance-method": "this version runs on one device; leave it out",
    "--deepep-": "this version runs on one device; leave it out",
    "--eplb-": "this version runs on one device; leave it out",
    "--moe-dense-tp-size": "this version runs on one device; leave it out",
    "--schedule-policy": "requests go first come, first served, or with "
    "--enable-priority-scheduling by their priority",
    "--enable-torch-compile": "nothing is compiled by torch; leave it out",
    "--torch-compile-": "nothing is compiled by torch; leave it out",
    "--sampling-backend": "there is one sampler; leave it out",
    "--enable-cache-report": "usage always counts cached tokens; leave it out",
    "--enable-hierarchical-cache": "keys stay in the device's memory; leave it out",
    "--hicache-": "keys stay in the device's memory; leave it out",
    "--log-requests": "no prompt is logged; --access-log writes a line for each request",
    "--json-model-override-args": "the shapes are read from the model's files; leave it out",
    "--lora-": "this version serves no LoRA adapters; leave it out and merge them into the weights",
    "--is-embedding": "models here write text and make no embeddings; leave it out",
    "--enable-multimodal": "models here read text only; leave it out",
}
"""Beginning of a flag → why there is none. One that ends with its whole last word, such as `--dp`,
also stands for that word with a suffix: `--dp-size`."""


def reason(flag: str) -> str | None:
    """Why `tetrad serve` has no such flag, or None when it is not SGLang's or not listed."""
    for start, why in REASONS.items():
        if flag == start or flag.startswith(start if start.endswith("-") else f"{start}-"):
            return why
    return None
