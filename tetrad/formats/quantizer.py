"""Quantising a checkpoint to NVFP4 in ModelOpt's layout, one tensor at a time.

    model.layers.3.mlp.experts.0.gate_proj.weight          BF16 [out, in]
  → model.layers.3.mlp.experts.0.gate_proj.weight          U8 [out, in / 2]
    model.layers.3.mlp.experts.0.gate_proj.weight_scale    F8_E4M3 [out, in / 16]
    model.layers.3.mlp.experts.0.gate_proj.weight_scale_2  F32 []

Everything else is copied as it is. config.json is written last: a folder that lacks it is a run
that did not finish, and is not loadable.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tetrad import __version__
from tetrad.core.errors import CheckpointError, ConfigError, UserError, nearest
from tetrad.formats import nvfp4
from tetrad.formats.catalogue import INDEX_NAME, PICKLE_SUFFIXES, StoredTensor
from tetrad.formats.checkpoint import Checkpoint, OnBytes
from tetrad.formats.metadata import HF_QUANT_CONFIG
from tetrad.formats.naming import DENSE_DTYPES
from tetrad.formats.options import ROUTED_EXPERTS
from tetrad.formats.patterns import Patterns, summarize
from tetrad.formats.quantize_report import REPORT_NAME, QuantizeReport, kind_of
from tetrad.formats.weights import NVFP4_BLOCK
from tetrad.formats.writer import PlannedTensor, write_shards

NEVER = ("*.mlp.gate", "*embed_tokens")
"""Routers choose experts by small differences, and embeddings are looked up, not multiplied."""
_WEIGHT_FILES = (".safetensors", ".gguf", *PICKLE_SUFFIXES)
_SIBLINGS = (
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa", "indexer.wk", "indexer.weights_proj"),
    ("q_b_proj", "indexer.wq_b"),
)
"""Linears of one module that multiply the same input. They share a global scale, as ModelOpt makes
them, so that engines can fuse them."""


def run(
    source: Path,
    target: Path,
    include: Sequence[str] = ROUTED_EXPERTS,
    exclude: Sequence[str] = (),
    *,
    force: bool = False,
    device: str = "cpu",
    max_shard_bytes: int = 5_000_000_000,
    on_bytes: OnBytes | None = None,
) -> QuantizeReport:
    """Write the checkpoint in `source` to `target`, with some linears in NVFP4.

    `include` and `exclude` are anchored glob patterns over module names ("model.layers.3.mlp.*");
    the default takes the routed experts of every layer, those of MTP layers too. `force` replaces
    the checkpoint that `target` holds. `on_bytes` is called with (bytes read, bytes to read).

    Returns the error made, per kind of tensor; also written to `target` as quantize_report.json.
    Raises UserError in one sentence. Only non-finite weights and a full disk are found after
    writing has begun.
    """
    _check_folders(source, target, force)
    checkpoint = Checkpoint.open(source, device, on_bytes)
    selected = _select(checkpoint, include, exclude)
    report = QuantizeReport(source.name, list(include), list(exclude))
    plan = _plan(checkpoint, selected)
    try:
        _clear(target)
        write_shards(target, plan, _convert(checkpoint, selected, report), max_shard_bytes)
        _copy_companions(source, target)
        _fresh(target / REPORT_NAME).write_text(report.to_json(), encoding="utf-8")
        _write_configs(checkpoint, selected, target)
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error}.") from error
    return report


def _check_folders(source: Path, target: Path, force: bool) -> None:
    if source.resolve() == target.resolve():
        raise ConfigError(f"SOURCE and TARGET are both {source}; give another TARGET.")
    if not target.exists():
        return
    if not target.is_dir():
        raise ConfigError(f"{target} is a file; TARGET must be a folder.")
    if any(target.iterdir()) and not force:
        raise ConfigError(f"{target} is not empty; --force replaces the checkpoint in it.")


def _select(checkpoint: Checkpoint, include: Sequence[str], exclude: Sequence[str]) -> set[str]:
    """The modules to quantise. Every pattern must match something, else it is a typing mistake."""
    _refuse_quantized(checkpoint)
    linears = [module for module in _modules(checkpoint) if not Patterns(NEVER).match(module)]
    for pattern in (*include, *exclude):
        matcher = Patterns([pattern])
        if not any(matcher.match(module) for module in linears):
            raise ConfigError(
                f"No linear of {checkpoint.folder} matches '{pattern}'; patterns cover whole "
                f"module names, such as '{linears[-1] if linears else 'lm_head'}'."
                f"{nearest(pattern, linears[:1000])}"
            )
    wanted, unwanted = Patterns(include), Patterns(exclude)
    selected = {m for m in linears if wanted.match(m) and not unwanted.match(m)}
    if not selected:
        raise ConfigError("Nothing is left to quantise: every included linear is excluded.")
    for module in selected:
        width = _stored_weight(checkpoint, module).shape[1]
        if width % NVFP4_BLOCK:
            raise CheckpointError(
                f"'{module}' is {width} wide, and NVFP4 needs a multiple of {NVFP4_BLOCK}; "
                f"--exclude it."
            )
    return selected


def _refuse_quantized(checkpoint: Checkpoint) -> None:
    advice = "quantise from the bf16 release of the model"
    if method := (checkpoint.config.get("quantization_config") or {}).get("quant_method"):
        raise CheckpointError(
            f"{checkpoint.folder} is already quantised (config.json says '{method}'); {advice}."
        )
    for name in checkpoint.names:
        stored = checkpoint.stored(name)
        if name.endswith(("weight", "weight_packed")) and stored.dtype not in DENSE_DTYPES:
            raise CheckpointError(
                f"'{name}' in {checkpoint.folder} is stored as {stored}, and only bf16, fp16 and "
                f"fp32 weights can be quantised; {advice}."
            )


def _modules(checkpoint: Checkpoint) -> list[str]:
    """Modules with a two-dimensional weight."""
    weights = [name for name in checkpoint.names if name.endswith(".weight")]
    return [n.removesuffix(".weight") for n in weights if len(checkpoint.stored(n).shape) == 2]


def _stored_weight(checkpoint: Checkpoint, module: str) -> StoredTensor:
    return checkpoint.stored(f"{module}.weight")


def _in_order(checkpoint: Checkpoint) -> list[str]:
    """Names with layer 2 before layer 10, so that a layer's tensors lie together."""
    return sorted(checkpoint.names, key=_natural)


def _natural(name: str) -> list[tuple[bool, int, str]]:
    return [(not p.isdigit(), int(p) if p.isdigit() else 0, p) for p in re.split(r"\.", name)]


def _plan(checkpoint: Checkpoint, selected: set[str]) -> list[PlannedTensor]:
    plan: list[PlannedTensor] = []
    for name in _in_order(checkpoint):
        stored = checkpoint.stored(name)
        module = name.removesuffix(".weight")
        if module not in selected:
            plan.append(PlannedTensor(name, stored.dtype, stored.shape, stored.nbytes))
            continue
        out, width = stored.shape
        codes, scales = (out, width // 2), (out, width // NVFP4_BLOCK)
        plan += [
            PlannedTensor(name, "U8", codes, out * width // 2),
            PlannedTensor(f"{name}_scale", "F8_E4M3", scales, out * width // NVFP4_BLOCK),
            PlannedTensor(f"{name}_scale_2", "F32", (), 4),
        ]
    return plan


def _convert(
    checkpoint: Checkpoint, selected: set[str], report: QuantizeReport
) -> Iterator[Tensor]:
    """The tensors of the plan, in its order."""
    shared = _SharedScales(checkpoint, selected)
    for name in _in_order(checkpoint):
        module = name.removesuffix(".weight")
        if module not in selected:
            yield checkpoint.raw(name)
            report.keep(kind_of(name), checkpoint.stored(name).nbytes)
            continue
        matrix = checkpoint.raw(name)
        if not torch.isfinite(matrix).all():
            raise CheckpointError(f"Tensor '{name}' holds NaN or infinite values.")
        weight = nvfp4.quantize(matrix, shared.of(module))
        report.quantize(kind_of(name), module, matrix, weight)
        yield from weight.tensors().values()


class _SharedScales:
    """The global scale of each linear, one for all siblings that are quantised."""

    def __init__(self, checkpoint: Checkpoint, selected: set[str]) -> None:
        self._checkpoint = checkpoint
        self._selected = selected
        self._known: dict[str, Tensor] = {}

    def of(self, module: str) -> Tensor:
        """float32 []. Reads all siblings of `module` the first time, remembers it for them."""
        if module not in self._known:
            siblings = [name for name in _siblings(module) if name in self._selected]
            matrices = (self._checkpoint.raw(f"{name}.weight") for name in siblings)
            self._known.update(dict.fromkeys(siblings, nvfp4.global_scale_of(matrices)))
        return self._known.pop(module)


def _siblings(module: str) -> list[str]:
    """Names that share a global scale with `module`, itself among them."""
    for leaves in _SIBLINGS:
        for leaf in leaves:
            if module.endswith(f".{leaf}"):
                return [module.removesuffix(leaf) + other for other in leaves]
    return [module]


def _clear(target: Path) -> None:
    """Make the folder; remove what belongs to a checkpoint that was there, config.json first."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", HF_QUANT_CONFIG, INDEX_NAME):
        (target / name).unlink(missing_ok=True)
    for shard in target.glob("*.safetensors"):
        shard.unlink()


def _fresh(path: Path) -> Path:
    """`path`, free to be written: what was there may be a link, and the file it leads to is not
    ours to overwrite."""
    path.unlink(missing_ok=True)
    return path


def _copy_companions(source: Path, target: Path) -> None:
    """Tokenizer, chat template, generation defaults, licence: all files that are not weights."""
    left_out = {"config.json", HF_QUANT_CONFIG, INDEX_NAME, REPORT_NAME}
    for file in source.iterdir():
        if file.is_file() and file.name not in left_out and file.suffix not in _WEIGHT_FILES:
            shutil.copyfile(file, _fresh(target / file.name))


def _write_configs(checkpoint: Checkpoint, selected: set[str], target: Path) -> None:
    ignore = summarize(set(_modules(checkpoint)) - selected, selected)
    producer = {"name": "tetrad", "version": __version__}
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": NVFP4_BLOCK}
    quantization_config = {
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
        "ignore": ignore,
        "quant_algo": "W4A16_NVFP4",
        "producer": producer,
        "quant_method": "modelopt",
    }
    beside = {
        "producer": producer,
        "quantization": {
            "quant_algo": "W4A16_NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": NVFP4_BLOCK,
            "exclude_modules": ignore,
        },
    }
    _write_json(target / HF_QUANT_CONFIG, beside)
    config = {**checkpoint.config, "quantization_config": quantization_config}
    _write_json(target / "config.json", config)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    _fresh(path).write_text(
        json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
