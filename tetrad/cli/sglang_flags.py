"""Flags of SGLang's launch scripts that `tetrad serve` does without, each with the reason.

A script that is carried over stops at the first of them; the reason says whether leaving it out
changes anything.
"""

from __future__ import annotations

_OF_SEVERAL_DEVICES = (
    *("--dp", "--data-parallel-", "--enable-dp-", "--attn-", "--ep", "--expert-parallel-size"),
    *("--enable-ep-", "--enable-deepep-", "--deepep-", "--enable-eplb", "--eplb-", "--moe-dp-size"),
    *("--moe-ep-size", "--moe-dense-tp-size", "--moe-a2a-backend", "--pp", "--nnodes", "--nccl-"),
    *("--pipeline-parallel-size", "--node-rank", "--dist-", "--load-balance-method"),
    *("--enable-nccl-", "--enable-two-batch-overlap", "--enable-single-batch-overlap"),
    *("--disable-custom-all-reduce", "--enable-flashinfer-allreduce-fusion", "--enable-p2p-check"),
    *("--enable-symm-mem", "--enable-torch-symm-mem", "--enable-mscclpp", "--gpu-id-step"),
)
_NO_TORCH_COMPILER = "nothing is compiled by torch; leave it out"
_LINEAR = "linear layers choose their kernels themselves; leave it out"
_IN_MEMORY = "keys stay in the device's memory; leave it out"
_PREFILL_GRAPHS = "CUDA graphs hold decode steps only; leave it out"
_ALREADY_WARM = "what has to compile does so before the server is ready; leave it out"
_READERS = "several threads read the weights' files at once; leave it out"

REASONS = {
    **dict.fromkeys(_OF_SEVERAL_DEVICES, "this version runs on one device; leave it out"),
    "--base-gpu-id": "CUDA_VISIBLE_DEVICES chooses the GPU; leave it out",
    "--config": "flags come from the command line only; write them there",
    "--trust-remote-code": "no code in a model folder is run; leave it out",
    "--tokenizer-worker-num": "--api-workers is the number of processes that do such work",
    "--tokenizer-": "the tokenizer is the model folder's; leave it out",
    "--skip-tokenizer-init": "requests may carry text or ids; leave it out",
    "--model-loader-extra-config": _READERS,
    "--weight-loader-": _READERS,
    "--quantization-param-path": "scales of keys are computed as they are stored; leave it out",
    "--page-size": "a page always has 64 tokens; leave it out",
    "--max-prefill-tokens": "--chunked-prefill-size is the token budget of a step",
    "--prefill-max-requests": "--chunked-prefill-size is the token budget of a step",
    "--enable-mixed-chunk": "prompts and running requests always share a step; leave it out",
    "--disable-cuda-graph-padding": "--cuda-graph-bs lists the sizes that need none; leave it out",
    "--cuda-graph-backend-": "--disable-cuda-graph turns them off; leave it out",
    "--disable-piecewise-cuda-graph": _PREFILL_GRAPHS,
    "--enable-piecewise-cuda-graph": _PREFILL_GRAPHS,
    "--piecewise-cuda-graph-": _PREFILL_GRAPHS,
    "--enable-metrics": "/metrics is always there; leave it out",
    "--decode-log-interval": "figures are at /metrics and fill no log; leave it out",
    "--speculative-": "this version does not speculate; without it answers are the same, later",
    "--disaggregation-": "one process computes prompts and answers; leave it out",
    "--schedule-policy": "requests go first come, first served, or with "
    "--enable-priority-scheduling by their priority",
    "--enable-torch-compile": _NO_TORCH_COMPILER,
    "--torch-compile-": _NO_TORCH_COMPILER,
    "--fp8-gemm-": _LINEAR,
    "--fp4-gemm-": _LINEAR,
    "--dsa-topk-backend": "one kernel chooses keys; leave it out",
    "--nsa-topk-backend": "one kernel chooses keys; leave it out",
    "--disable-shared-experts-fusion": "the shared expert keeps the format that it is stored in; "
    "leave it out",
    "--disable-flashinfer-autotune": "no kernel is tuned by FlashInfer; leave it out",
    "--flashinfer-autotune-": "no kernel is tuned by FlashInfer; leave it out",
    "--skip-server-warmup": _ALREADY_WARM,
    "--warmups": _ALREADY_WARM,
    "--enable-nan-detection": "an answer whose logits are not finite always ends with an error; "
    "leave it out",
    "--sampling-backend": "there is one sampler; leave it out",
    "--enable-cache-report": "usage always counts cached tokens; leave it out",
    "--enable-hierarchical-cache": _IN_MEMORY,
    "--hicache-": _IN_MEMORY,
    "--enable-memory-saver": "weights and keys stay in the device's memory; leave it out",
    "--log-level-http": "--log-level is that of HTTP too",
    "--log-requests": "no prompt is logged; --access-log writes a line for each request",
    "--json-model-override-args": "the shapes are read from the model's files; leave it out",
    "--lora-": "this version serves no LoRA adapters; leave it out and merge them into the weights",
    "--enable-custom-logit-processor": "no code of others is loaded; leave it out",
    "--is-embedding": "models here write text and make no embeddings; leave it out",
    "--enable-multimodal": "models here read text only; leave it out",
    "--mm-": "models here read text only; leave it out",
}
"""Beginning of a flag → why there is none. One that ends with its whole last word, such as `--dp`,
also stands for that word with a suffix: `--dp-size`."""


def reason(flag: str) -> str | None:
    """Why `tetrad serve` has no such flag, or None when it is not SGLang's or not listed."""
    for start, why in REASONS.items():
        if flag == start or flag.startswith(start if start.endswith("-") else f"{start}-"):
            return why
    return None
