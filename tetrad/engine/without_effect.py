"""Flags that have no effect in this configuration; each is named when the engine starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from tetrad.core.architectures import Arch
from tetrad.core.config import ServeConfig
from tetrad.core.llama_arch import LlamaArch
from tetrad.core.option import in_vain

DeviceKind = Literal["cpu", "cuda"]

OF_GRAPHS = ("disable_cuda_graph", "cuda_graph_max_bs", "cuda_graph_bs")
OF_A_MODEL = (
    *("quantization", "num_layers", "device", "dtype", "rehearse", "rehearse_routing"),
    *("mem_fraction_static", "kv_cache_dtype", "moe_runner_backend", "attention_backend"),
    *("decode_attention_backend", "prefill_attention_backend", *OF_GRAPHS),
    *("grammar_backend", "profile_dir"),
)
OF_EXPERTS = ("moe_runner_backend", "rehearse_routing")
OF_PRIORITIES = ("schedule_low_priority_values_first", "priority_scheduling_preemption_threshold")


def without_effect(config: ServeConfig, arch: Arch, device_kind: DeviceKind) -> list[str]:
    """A sentence for each flag that was given in vain, or for several that were for one reason.
    `arch` is what is served, with the layers that --num-layers leaves."""
    return [*_of_model(config, arch, device_kind), *_of_scheduling(config)]


def without_effect_on_null(config: ServeConfig) -> list[str]:
    """The same for `--load-format null`."""
    why = "with --load-format null, which has no model"
    return [*in_vain(config, OF_A_MODEL, why), *_of_scheduling(config)]


def _of_model(config: ServeConfig, arch: Arch, device_kind: DeviceKind) -> Iterator[str]:
    yield from in_vain(config, ("null_step_ms",), "without --load-format null")
    if isinstance(arch, LlamaArch):
        yield from in_vain(config, OF_EXPERTS, f"as {arch.model_type} has no experts")
    elif config.rehearse is None and config.load_format != "dummy":
        yield from in_vain(config, ("rehearse_routing",), "without --rehearse or dummy weights")
    if config.num_layers is not None and config.num_layers > arch.num_layers:
        yield f"--num-layers {config.num_layers} has no effect: there are {arch.num_layers}."
    if config.decode_attention_backend and config.prefill_attention_backend:
        both = "beside --decode-attention-backend and --prefill-attention-backend"
        yield from in_vain(config, ("attention_backend",), both)
    yield from _of_graphs(config, arch, device_kind)


def _of_graphs(config: ServeConfig, arch: Arch, device_kind: DeviceKind) -> Iterator[str]:
    if device_kind == "cpu":
        yield from in_vain(config, OF_GRAPHS, "on a CPU, which records nothing")
        yield from in_vain(
            config, ("disable_overlap_schedule",), "on a CPU, where steps never overlap"
        )
    elif isinstance(arch, LlamaArch):
        yield from in_vain(config, OF_GRAPHS, f"as steps of {arch.model_type} are not recorded")
    elif config.disable_cuda_graph:
        yield from in_vain(config, OF_GRAPHS[1:], "with --disable-cuda-graph")
    elif config.cuda_graph_bs:
        yield from in_vain(config, ("cuda_graph_max_bs",), "beside --cuda-graph-bs")


def _of_scheduling(config: ServeConfig) -> Iterator[str]:
    if config.enable_priority_scheduling:
        flag = ("abort_on_priority_when_disabled",)
        yield from in_vain(config, flag, "with --enable-priority-scheduling")
    else:
        yield from in_vain(config, OF_PRIORITIES, "without --enable-priority-scheduling")
