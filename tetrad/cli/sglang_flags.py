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
_NO_TORCH_COMPILER = "torch.compile is not used; leave it out"
_LINEAR = "linear layers choose their kernels themselves; leave it out"
_IN_MEMORY = "the KV cache stays in the device's memory; leave it out"
_PREFILL_GRAPHS = "CUDA graphs cover decode steps only; leave it out"
_ALREADY_WARM = "kernels are compiled before the server is ready; leave it out"
_READERS = "weight files are always read by several threads; leave it out"

REASONS = {
    **dict.fromkeys(_OF_SEVERAL_DEVICES, "this version runs on one device; leave it out"),
    "--base-gpu-id": "CUDA_VISIBLE_DEVICES chooses the GPU; leave it out",
    "--config": "flags come from the command line only; write them there",
    "--trust-remote-code": "code in a model folder is never run; leave it out",
    "--tokenizer-worker-num": "--api-workers sets the number of processes that tokenise",
    "--tokenizer-": "the tokenizer is the model folder's; leave it out",
    "--skip-tokenizer-init": "requests may carry text or ids; leave it out",
    "--model-loader-extra-config": _READERS,
    "--weight-loader-": _READERS,
    "--quantization-param-path": "KV cache scales are computed when keys are stored; leave it out",
    "--page-size": "pages always have 64 tokens; leave it out",
    "--max-prefill-tokens": "--chunked-prefill-size is the token budget of a step",
    "--prefill-max-requests": "--chunked-prefill-size is the token budget of a step",
    "--enable-mixed-chunk": "prompts and running requests always share a step; leave it out",
    "--disable-cuda-graph-padding": "--cuda-graph-bs lists the sizes without padding; leave it out",
    "--cuda-graph-backend-": "--disable-cuda-graph turns them off; leave it out",
    "--disable-piecewise-cuda-graph": _PREFILL_GRAPHS,
    "--enable-piecewise-cuda-graph": _PREFILL_GRAPHS,
    "--piecewise-cuda-graph-": _PREFILL_GRAPHS,
    "--enable-metrics": "/metrics is always available; leave it out",
    "--decode-log-interval": "statistics are at /metrics, not in the log; leave it out",
    "--speculative-": "this version has no speculative decoding; leave it out, answers are the "
    "same, only slower",
    "--disaggregation-": "prefill and decode run in one process; leave it out",
    "--schedule-policy": "requests go first come, first served, or with "
    "--enable-priority-scheduling by their priority",
    "--enable-torch-compile": _NO_TORCH_COMPILER,
    "--torch-compile-": _NO_TORCH_COMPILER,
    "--fp8-gemm-": _LINEAR,
    "--fp4-gemm-": _LINEAR,
    "--dsa-topk-backend": "there is one top-k kernel; leave it out",
    "--nsa-topk-backend": "there is one top-k kernel; leave it out",
    "--disable-shared-experts-fusion": "the shared expert keeps the format that it is stored in; "
    "leave it out",
    "--disable-flashinfer-autotune": "FlashInfer tunes no kernel here; leave it out",
    "--flashinfer-autotune-": "FlashInfer tunes no kernel here; leave it out",
    "--skip-server-warmup": _ALREADY_WARM,
    "--warmups": _ALREADY_WARM,
    "--enable-nan-detection": "an answer whose logits are not finite always ends with an error; "
    "leave it out",
    "--sampling-backend": "there is one sampler; leave it out",
    "--enable-cache-report": "usage always counts cached tokens; leave it out",
    "--enable-hierarchical-cache": _IN_MEMORY,
    "--hicache-": _IN_MEMORY,
    "--enable-memory-saver": "weights and the KV cache stays in the device's memory; leave it out",
    "--log-level-http": "--log-level also applies to HTTP",
    "--log-requests": "prompts are never logged; --access-log writes one line per request",
    "--json-model-override-args": "the shapes are read from the model's files; leave it out",
    "--lora-": "this version serves no LoRA adapters; leave it out and merge them into the weights",
    "--enable-custom-logit-processor": "third-party code is never loaded; leave it out",
    "--is-embedding": "models here generate text, not embeddings; leave it out",
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
