"""What the server's flags mean for the architecture being served."""

from __future__ import annotations

from typing import Any

import torch

from tetrad.core.architectures import Arch
from tetrad.core.config import ServeConfig
from tetrad.core.errors import ConfigError, UnsupportedError
from tetrad.core.keys import FP8, KeyFormat, key_format
from tetrad.core.llama_arch import LlamaArch
from tetrad.kernels.registry import OPS
from tetrad.kernels.select import FLAG_OPS, OP_NAMES, OpSet, backend_names

LATENT_OPS = frozenset(OP_NAMES) - {"qkv", "gqa", "sort_tokens", "reduce_experts"}
"""The last two are called by backends of `experts`, which have their own."""
LLAMA_OPS = frozenset(
    ("rms_norm", "add_rms_norm", "linear", "activation", "qkv", "gqa", "finite_rows", "sample")
)


def activation_type(config: ServeConfig, arch: Arch, device: torch.device) -> torch.dtype:
    """As --dtype says. auto: bfloat16 on a GPU, and on a processor that multiplies it for a model
    without experts; float32 on other processors."""
    if config.dtype != "auto":
        return torch.float32 if config.dtype == "float32" else torch.bfloat16
    if device.type == "cuda":
        return torch.bfloat16
    has_bf16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return torch.bfloat16 if has_bf16 and isinstance(arch, LlamaArch) else torch.float32


def cached_keys(config: ServeConfig, arch: Arch, dtype: torch.dtype) -> KeyFormat:
    """As --kv-cache-dtype says. Raises ConfigError."""
    name = str(dtype).removeprefix("torch.")
    if not isinstance(arch, LlamaArch):
        return key_format(config.kv_cache_dtype, name, arch.mla.kv_lora_rank, arch.indexer.head_dim)
    if config.kv_cache_dtype == FP8:
        raise ConfigError(
            f"--kv-cache-dtype fp8_e4m3: {arch.model_type} caches keys and values as activations "
            "are; --kv-cache-dtype auto works."
        )
    return key_format(config.kv_cache_dtype, name, 0, 0)


def forced_backends(config: ServeConfig, arch: Arch) -> dict[str, str]:
    """Op, or op in a phase → the backend that a flag asks for. Raises ConfigError for a flag that
    the architecture has no use for."""
    by_phase = {
        "decode_attention_backend": config.decode_attention_backend,
        "prefill_attention_backend": config.prefill_attention_backend,
    }
    if isinstance(arch, LlamaArch):
        if given := next((flag for flag, name in by_phase.items() if name is not None), None):
            raise ConfigError(
                f"--{given.replace('_', '-')}: {arch.model_type} has one backend of attention for "
                "all steps; --attention-backend names it."
            )
        backends = OPS["gqa"].backends
        if (chosen := config.attention_backend) not in ("auto", *backends):
            raise UnsupportedError(
                f"--attention-backend {chosen}: {arch.model_type} has no such backend; it has "
                f"{', '.join(backends)}, or auto to let Tetrad choose."
            )
        return {"gqa": chosen}
    wanted = {
        "moe_runner_backend": config.moe_runner_backend,
        "attention_backend": config.attention_backend,
        **by_phase,
    }
    return {FLAG_OPS[flag]: name for flag, name in wanted.items() if name is not None}


def told_ops(ops: OpSet, arch: Arch) -> list[dict[str, Any]]:
    """The report's rows of ops that the architecture calls."""
    called = LLAMA_OPS if isinstance(arch, LlamaArch) else LATENT_OPS
    return [row for row in ops.report if row["op"] in called]


def told_backends(ops: OpSet, arch: Arch) -> dict[str, str]:
    """Field of `ServeConfig` → the name of what it chose; of ops that the architecture calls."""
    if not isinstance(arch, LlamaArch):
        return backend_names(ops)
    names = {choice.op: choice.backend for choice in ops.choices}
    return {"attention_backend": names["gqa"]}
