"""From a configuration to an engine that can run steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tetrad import __version__
from tetrad.core.arch import ModelArch
from tetrad.core.architectures import Arch
from tetrad.core.config import ServeConfig
from tetrad.core.errors import ConfigError, UnsupportedError
from tetrad.core.gguf import is_gguf
from tetrad.core.keys import ACTIVATION, KeyFormat
from tetrad.core.messages import EngineProgress
from tetrad.core.presets import served_shapes
from tetrad.core.step import PAGE_TOKENS
from tetrad.data import text_folder
from tetrad.distributed.collectives import Collectives, Solo
from tetrad.distributed.rehearsal import Rehearsal
from tetrad.engine.arch_choices import (
    activation_type,
    cached_keys,
    forced_backends,
    told_backends,
    told_ops,
)
from tetrad.engine.cache_layout import CacheLayout, MemoryUse, plan_cache, resolve_context
from tetrad.engine.child import environment
from tetrad.engine.device import SpreadModel, resolve_device, use_sensible_threads
from tetrad.engine.engine import Engine, scheduler_of
from tetrad.engine.grammars import Grammars
from tetrad.engine.guard import NanGuard
from tetrad.engine.memory_statement import memory_statement
from tetrad.engine.prepare import Prepared, prepare
from tetrad.engine.profiling import TorchProfiler
from tetrad.engine.runner import Runner
from tetrad.engine.without_effect import without_effect
from tetrad.grammar.compiler import Compiler
from tetrad.grammar.masks import MaskMaker
from tetrad.grammar.vocabulary import VocabularySource
from tetrad.kernels.backend import Backend, Op
from tetrad.kernels.canary import canary
from tetrad.kernels.device import device_memory, snapshot
from tetrad.kernels.select import OpSet, resolve_ops
from tetrad.kernels.switch import switchable
from tetrad.layers.cache import KvCache
from tetrad.models.base import Model
from tetrad.models.dummy import dummy_model
from tetrad.models.loader import load_model
from tetrad.models.room import check_room

PROGRESS_INTERVAL_S = 0.25

Progress = Callable[[EngineProgress], None]


def load_engine(config: ServeConfig, on_progress: Progress | None = None) -> Engine:
    """Choose kernels, load the model, size the cache.

    Raises ConfigError, CheckpointError or UnsupportedError, each one sentence, when what was asked
    cannot be.
    """
    say = on_progress or (lambda _progress: None)
    folder = _model_folder(config)
    arch = served_shapes(folder, config.load_format).first_layers(config.num_layers)
    resolve_context(config, arch)
    device = resolve_device(config.device)
    _check_room(config, folder, arch, device)
    dtype = activation_type(config, arch, device)
    is_cpu = device.type == "cpu"
    num_threads = use_sensible_threads() if is_cpu else torch.get_num_threads()
    name, keys = str(dtype).removeprefix("torch."), cached_keys(config, arch, dtype)
    ops, switches = switchable(_choose_ops(config, arch, device, dtype, keys, say))
    started = time.monotonic()
    say(EngineProgress("weights", str(folder)))
    others = _others(config, arch, device, dtype)
    model = _load_weights(config, folder, arch, device, dtype, ops, others, say)
    load_s = time.monotonic() - started
    for note in _notes(config, model):
        say(EngineProgress("note", note))
    layout, use = _lay_out_cache(config, model, device, dtype, keys)
    say(EngineProgress("cache", layout.sentence))
    cache = _make_cache(arch, layout, device, dtype, keys)
    runner = Runner(SpreadModel(model, num_threads) if is_cpu else model, cache, ops, device)
    prepared = _prepare(config, layout, runner, arch, device, say)
    statement = memory_statement(
        config,
        layout,
        use,
        weight_bytes=model.weight_bytes,
        activation_bytes=prepared.activation_bytes,
        graph_bytes=prepared.graph_bytes,
    )
    info = _info(folder, model, layout, use, ops) | {
        "device": snapshot(device).as_dict(),
        "dtype": name,
        "kv_cache_dtype": name if keys == ACTIVATION else keys,
        "load_s": round(load_s, 3),
        "random_seed": config.random_seed,
        "disable_radix_cache": config.disable_radix_cache,
        "load_format": config.load_format,
        "num_layers": arch.num_layers,
        "rehearse": config.rehearse,
        **asdict(prepared),
        "memory_statement": statement,
    }
    engine = Engine(
        scheduler_of(config, layout.limits),
        runner,
        info,
        # launching waits for a CPU, so tokens would only be handed out a step late
        overlap=not (config.disable_overlap_schedule or is_cpu),
        continuous_steps=config.num_continuous_decode_steps,
        stream_interval=config.stream_interval,
        guard=NanGuard(runner, model, switches, partial(_refusal, device, dtype, keys)),
        profiler=TorchProfiler(config.profile_dir),
    )
    engine.grammars = _grammars(config, folder, layout)
    return engine


def _grammars(config: ServeConfig, folder: Path, layout: CacheLayout) -> Grammars | None:
    """What constrains answers, unless nothing is to, or the model has no vocabulary."""
    of_text = text_folder(folder, config.load_format)
    has_text = is_gguf(of_text) or (of_text / "tokenizer.json").is_file()
    if config.grammar_backend == "none" or not has_text:
        return None
    limits = layout.limits
    source = VocabularySource(str(of_text), limits.vocab, limits.eos_ids, is_lent=of_text != folder)
    compiler = Compiler(source, environment())
    return Grammars(compiler, MaskMaker(compiler, limits.vocab, limits.max_running_requests))


def _refusal(
    device: torch.device, dtype: torch.dtype, keys: KeyFormat, op: Op, backend: Backend
) -> str | None:
    return backend.why_not(snapshot(device)) or canary(op, backend, dtype, device, keys)


def _model_folder(config: ServeConfig) -> Path:
    if config.tp != 1:
        raise UnsupportedError(f"--tp {config.tp}: this version runs on one device; --tp 1 works.")
    if config.model is None:
        raise ConfigError("No model folder was given; name one that holds config.json.")
    return config.model


def _choose_ops(
    config: ServeConfig,
    arch: Arch,
    device: torch.device,
    dtype: torch.dtype,
    keys: KeyFormat,
    say: Progress,
) -> OpSet:
    say(EngineProgress("kernels", f"choosing backends on {snapshot(device).name}"))
    return resolve_ops(
        str(device),
        forced_backends(config, arch),
        dtype,
        arch if isinstance(arch, ModelArch) else None,
        lambda sentence: say(EngineProgress("kernels", sentence)),
        keys,
    )


def _notes(config: ServeConfig, model: Model) -> Iterator[str]:
    """What a person should know of what was loaded."""
    if model.checkpoint_notes:
        yield " ".join(model.checkpoint_notes)
    if config.rehearsed is not None:
        yield f"rehearsing {config.rehearsed}: the text means nothing"


def _others(
    config: ServeConfig, arch: Arch, device: torch.device, dtype: torch.dtype
) -> Collectives:
    """The ranks that hold the rest of the model, stood in for; or nobody."""
    ranks = config.rehearsed
    if ranks is None:
        return Solo()
    if not isinstance(arch, ModelArch):
        raise ConfigError(
            f"--rehearse {ranks}: {arch.model_type} runs on one device; leave it out."
        )
    ranks.check_program(arch, "--rehearse")
    if ranks.pp > 1:
        raise ConfigError(
            f"--rehearse pp={ranks.pp}: a stage of a pipeline gives no tokens to serve; tetrad "
            "bench rank runs one, and pp=1 with --num-layers serves as many layers."
        )
    return Rehearsal(
        ranks,
        arch,
        most_rows=config.chunked_prefill_size,
        routing=config.rehearse_routing,
        seed=config.random_seed,
        device=device,
        dtype=dtype,
    )


def _check_room(config: ServeConfig, folder: Path, arch: Arch, device: torch.device) -> None:
    """Of weights that are read and kept as they are, all of them."""
    is_whole = config.load_format == "auto" and not (config.rehearse or config.quantization)
    if is_whole and not is_gguf(folder):
        check_room(folder, arch, device_memory(device).total_bytes)


def _load_weights(
    config: ServeConfig,
    folder: Path,
    arch: Arch,
    device: torch.device,
    dtype: torch.dtype,
    ops: OpSet,
    others: Collectives,
    say: Progress,
) -> Model:
    try:
        if config.load_format == "dummy":
            return dummy_model(
                arch,
                device=device,
                dtype=dtype,
                ops=ops,
                others=others,
                seed=config.random_seed,
                is_skewed=config.rehearse_routing == "skewed",
                quantization=config.quantization,
            )
        return load_model(
            folder,
            device=str(device),
            dtype=dtype,
            ops=ops,
            on_progress=_ReadMeter(say).on_bytes,
            others=others,
            num_layers=config.num_layers,
            quantization=config.quantization,
        )
    except torch.OutOfMemoryError as error:
        total = device_memory(device).total_bytes / 1e9
        raise ConfigError(
            f"The weights of {folder} do not fit into the {total:.3g} GB of {device}: {error}"
        ) from error


class _ReadMeter:
    """Turns "bytes done of total" into progress messages, a few each second."""

    def __init__(self, say: Progress) -> None:
        self._say = say
        self._started_at = self._said_at = time.monotonic()

    def on_bytes(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done == total or now - self._said_at >= PROGRESS_INTERVAL_S:
            self._said_at = now
            rate = done / 1e9 / max(now - self._started_at, 1e-9)
            detail = f"{done / 1e9:.3f} of {total / 1e9:.3f} GB ({rate:.2f} GB/s)"
            self._say(EngineProgress("weights", detail))


def _lay_out_cache(
    config: ServeConfig, model: Model, device: torch.device, dtype: torch.dtype, keys: KeyFormat
) -> tuple[CacheLayout, MemoryUse]:
    memory = device_memory(device)
    is_gpu = device.type == "cuda"
    use = MemoryUse(
        device_kind=device.type,
        total_bytes=memory.total_bytes,
        used_bytes=memory.total_bytes - memory.free_bytes if is_gpu else model.weight_bytes,
        free_bytes=memory.free_bytes,
        page_bytes=KvCache.bytes_per_page(model.arch, dtype, keys),
    )
    return plan_cache(config, model.arch, use), use


def _make_cache(
    arch: Arch, layout: CacheLayout, device: torch.device, dtype: torch.dtype, keys: KeyFormat
) -> KvCache:
    try:
        # One page more than sequences get: padding of recorded steps is written there.
        return KvCache(arch, layout.limits.num_pages + 1, device, dtype, keys)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"The cache of {layout.sentence} could not be allocated; lower --mem-fraction-static "
            f"below {layout.fraction:g}."
        ) from error


def _prepare(
    config: ServeConfig,
    layout: CacheLayout,
    runner: Runner,
    arch: Arch,
    device: torch.device,
    say: Progress,
) -> Prepared:
    for sentence in without_effect(config, arch, "cuda" if device.type == "cuda" else "cpu"):
        say(EngineProgress("note", sentence))

    def tell(sentence: str) -> None:
        say(EngineProgress("graphs", sentence))

    return prepare(config, arch, layout.limits, runner, device, tell)


def _info(
    folder: Path, model: Model, layout: CacheLayout, use: MemoryUse, ops: OpSet
) -> dict[str, Any]:
    limits = layout.limits
    return {
        "version": __version__,
        "model_path": str(folder),
        "model_type": model.arch.model_type,
        "context_length": min(limits.context_tokens, limits.cache_tokens),
        "max_total_tokens": limits.cache_tokens,
        "max_running_requests": limits.max_running_requests,
        "chunked_prefill_size": limits.step_tokens,
        "page_size": PAGE_TOKENS,
        "cache_limited_by": layout.limited_by,
        "cache_sentence": layout.sentence,
        "mem_fraction_static": layout.fraction,
        "memory": asdict(use)
        | {"weight_bytes": model.weight_bytes, "cache_bytes": limits.num_pages * use.page_bytes},
        "weights": model.weight_report,
        "read_gb_per_s": model.read_gb_per_s,
        "num_threads": torch.get_num_threads(),
        "checkpoint_notes": list(model.checkpoint_notes),
        "backends": told_ops(ops, model.arch),
        **told_backends(ops, model.arch),
    }
