"""SGLang's names for backends of attention, so that a launch script carries over."""

from __future__ import annotations

from tetrad.core.backend_names import ATTENTION, checked_backend

SAME = {
    "dsa": "auto",
    "nsa": "auto",
    "torch_native": "torch",
    "triton_sparse_mla": "triton",
}
"""SGLang's name → ours."""

_FLASHMLA = "is FlashMLA's kernel, which Tetrad does not call"
_FLASHINFER = "is FlashInfer's kernel, which Tetrad does not call"
_FLASHATTENTION = "is FlashAttention, which does not read a cache of latents"
_TRTLLM = "is TensorRT-LLM's kernel, which Tetrad does not call"
MISSING = {
    "flashmla": _FLASHMLA,
    "flashmla_sparse": _FLASHMLA,
    "flashmla_sparse_q8": _FLASHMLA,
    "flashmla_kv": _FLASHMLA,
    "flashmla_auto": _FLASHMLA,
    "flashinfer": _FLASHINFER,
    "fa3": _FLASHATTENTION,
    "fa4": _FLASHATTENTION,
    "trtllm": _TRTLLM,
    "trtllm_mla": _TRTLLM,
    "cutlass_mla": "is CUTLASS's kernel, which Tetrad does not call",
    "tilelang": "needs TileLang, which Tetrad does not use",
    "aiter": "is for AMD's GPUs, on which Tetrad does not run",
    "intel_xpu": "is for Intel's GPUs, on which Tetrad does not run",
}
"""SGLang's name → why there is no such backend."""


def checked_attention(name: str) -> str:
    """Our name of a backend. Raises ValueError for one that we have not."""
    if name in MISSING:
        raise ValueError(
            f"in SGLang this {MISSING[name]}; auto takes the fastest of Tetrad's own that can run"
        )
    return checked_backend(SAME.get(name, name), ATTENTION)
