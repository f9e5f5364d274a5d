"""Flags of vLLM's launch scripts: what `tetrad serve` calls them, or why it does without."""

from __future__ import annotations

NAMES = {
    "--max-model-len": "--context-length",
    "--max-num-seqs": "--max-running-requests",
    "--max-num-batched-tokens": "--chunked-prefill-size",
    "--gpu-memory-utilization": "--mem-fraction-static",
    "--enforce-eager": "--disable-cuda-graph",
    "--max-cudagraph-capture-size": "--cuda-graph-max-bs",
    "--cudagraph-capture-sizes": "--cuda-graph-bs",
    "--cuda-graph-sizes": "--cuda-graph-bs",
    "--no-enable-prefix-caching": "--disable-radix-cache",
    "--no-async-scheduling": "--disable-overlap-schedule",
    "--moe-backend": "--moe-runner-backend",
    "--guided-decoding-backend": "--grammar-backend",
    "--generation-config": "--sampling-defaults",
    "--seed": "--random-seed",
    "--uvicorn-log-level": "--log-level",
    "--enable-log-requests": "--access-log",
}
"""vLLM's name → ours. Not all take the same values; the help says which."""

_ONE_DEVICE = "this version runs on one device; leave it out"
_NOTHING_FETCHED = "nothing is downloaded; leave it out and give a folder"
_TEXT_ONLY = "models here read text only; leave it out"
_NO_ADAPTERS = "this version serves no LoRA adapters; leave it out and merge them into the weights"
_NO_CODE = "third-party code is never loaded; leave it out"
_ON_DEVICE = "weights and the KV cache stays in the device's memory; leave it out"
_SHAPES = "the shapes are read from the model's files; leave it out"
_CHUNKED = "prompts are always computed in chunks, of --chunked-prefill-size; leave it out"

REASONS = {
    "--enable-auto-tool-choice": "tool calls are read whenever a request names tools, in the form "
    "that --tool-call-parser says; leave it out",
    "--tokenizer": "the tokenizer is the model folder's; leave it out",
    "--enable-prefix-caching": "prefixes are kept unless --disable-radix-cache says not to; leave "
    "it out",
    "--enable-chunked-prefill": _CHUNKED,
    "--no-enable-chunked-prefill": _CHUNKED,
    "--async-scheduling": "a step is planned while the last one runs unless "
    "--disable-overlap-schedule says not to; leave it out",
    "--scheduling-policy": "requests go first come, first served, or with "
    "--enable-priority-scheduling by their priority",
    "--block-size": "pages always have 64 tokens; leave it out",
    "--num-gpu-blocks-override": "--max-total-tokens limits the tokens in the KV cache",
    "--kv-cache-memory-bytes": "--max-total-tokens limits the tokens in the KV cache",
    "--swap-space": _ON_DEVICE,
    "--cpu-offload-gb": _ON_DEVICE,
    "--kv-offloading-size": _ON_DEVICE,
    "--kv-offloading-backend": _ON_DEVICE,
    "--enable-sleep-mode": _ON_DEVICE,
    "--calculate-kv-scales": "KV cache scales are computed when keys are stored; leave it out",
    "--enable-expert-parallel": _ONE_DEVICE,
    "--expert-placement-strategy": _ONE_DEVICE,
    "--prefill-context-parallel-size": _ONE_DEVICE,
    "--enable-dbo": _ONE_DEVICE,
    "--headless": _ONE_DEVICE,
    "--master-addr": _ONE_DEVICE,
    "--master-port": _ONE_DEVICE,
    "--decode-context-parallel-size": _ONE_DEVICE,
    "--distributed-executor-backend": _ONE_DEVICE,
    "--all2all-backend": _ONE_DEVICE,
    "--enable-eplb": _ONE_DEVICE,
    "--kv-transfer-config": "prefill and decode run in one process; leave it out",
    "--enable-flashinfer-autotune": "FlashInfer tunes no kernel here; leave it out",
    "--max-num-partial-prefills": _CHUNKED,
    "--long-prefill-token-threshold": _CHUNKED,
    "--optimization-level": "torch.compile is not used; leave it out",
    "--compilation-config": "torch.compile is not used; leave it out, and see --cuda-graph-bs "
    "for the sizes of CUDA graphs",
    "--download-dir": _NOTHING_FETCHED,
    "--revision": _NOTHING_FETCHED,
    "--hf-token": _NOTHING_FETCHED,
    "--hf-overrides": _SHAPES,
    "--rope-scaling": _SHAPES,
    "--rope-theta": _SHAPES,
    "--limit-mm-per-prompt": _TEXT_ONLY,
    "--language-model-only": _TEXT_ONLY,
    "--runner": "models here generate text; leave it out",
    "--task": "models here generate text; leave it out",
    "--model-impl": _NO_CODE,
    "--allowed-local-media-path": _TEXT_ONLY,
    "--enable-lora": _NO_ADAPTERS,
    "--lora-modules": _NO_ADAPTERS,
    "--max-loras": _NO_ADAPTERS,
    "--max-lora-rank": _NO_ADAPTERS,
    "--tool-parser-plugin": _NO_CODE,
    "--logits-processors": _NO_CODE,
    "--middleware": _NO_CODE,
    "--default-chat-template-kwargs": "requests set them in chat_template_kwargs",
    "--override-generation-config": "a request says them; --sampling-defaults openai leaves the "
    "model's own aside",
    "--enable-prompt-tokens-details": "usage always counts cached tokens; leave it out",
    "--disable-uvicorn-access-log": "only --access-log turns such lines on; leave it out",
    "--no-enable-log-requests": "prompts are never logged; leave it out",
    "--disable-log-requests": "prompts are never logged; leave it out",
    "--disable-log-stats": "statistics are at /metrics, not in the log; leave it out",
}
"""vLLM's flag → why there is none."""


def reason(flag: str) -> str | None:
    """What stands for vLLM's flag, or why nothing does; None when it is not listed."""
    if (name := NAMES.get(flag)) is not None:
        return f"its name here is {name}"
    return REASONS.get(flag)
