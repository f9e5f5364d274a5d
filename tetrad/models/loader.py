"""Fills a model from a checkpoint, and refuses one that does not fit exactly."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch

from tetrad.core.arch import ModelArch
from tetrad.core.architectures import Arch, arch_of
from tetrad.core.errors import CheckpointError, nearest
from tetrad.core.gguf import is_gguf
from tetrad.core.llama_arch import LlamaArch
from tetrad.core.quantization import check_scheme
from tetrad.core.ranks import Ranks
from tetrad.distributed.collectives import Collectives, Solo
from tetrad.formats.checkpoint import Checkpoint
from tetrad.formats.gguf import GgufWeights
from tetrad.formats.requantized import RequantizedWeights
from tetrad.kernels.select import OpSet
from tetrad.layers.source import StoredWeights, WeightLedger, WeightSource
from tetrad.models.base import Model
from tetrad.models.registry import build
from tetrad.models.shards import RankWeights

OnProgress = Callable[[int, int], None]
"""Called with (bytes read so far, bytes in the checkpoint)."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_GGUF_LAYER = re.compile(r"blk\.(\d+)\.")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\..+")


def load_model(
    folder: Path,
    *,
    device: str,
    dtype: torch.dtype,
    ops: OpSet,
    on_progress: OnProgress | None = None,
    others: Collectives | None = None,
    num_layers: int | None = None,
    quantization: str | None = None,
) -> Model:
    """Load `folder`, or a GGUF file, onto `device` ("cpu", "cuda") for activations of `dtype`: all
    of it, or what the rank of `others` holds, or of either only the first `num_layers`; linears
    quantised as `quantization` says, where it says something.

    Raises CheckpointError, in one sentence, when config.json is not of a supported model, when a
    tensor is missing or has another shape, or when one is left over that nobody knows.
    """
    others = others or Solo()
    arch = arch_of(folder).first_layers(num_layers)
    check_scheme(quantization, arch)
    if isinstance(arch, LlamaArch) and is_gguf(folder):
        return _load_gguf(folder, arch, device, dtype, ops, on_progress, quantization)
    checkpoint = Checkpoint.open(folder, device, on_progress)
    stored: StoredWeights = checkpoint
    if isinstance(arch, ModelArch):
        stored = RankWeights(checkpoint, others.ranks)
    weights = RequantizedWeights(stored, quantization)
    source = WeightSource(weights, ops, dtype, WeightLedger(), others=others)
    try:
        model = build(arch, source)
    finally:
        checkpoint.close()
    _refuse_leftovers(checkpoint, arch, others.ranks)
    for name, num_bytes in weights.saved.items():
        source.ledger.totals[name].stored_bytes += num_bytes
    model.checkpoint_notes = tuple(checkpoint.notes)
    model.read_gb_per_s = checkpoint.nbytes_read / 1e9 / max(checkpoint.read_s, 1e-9)
    return model


def _load_gguf(
    path: Path,
    arch: LlamaArch,
    device: str,
    dtype: torch.dtype,
    ops: OpSet,
    on_progress: OnProgress | None,
    quantization: str | None,
) -> Model:
    file = GgufWeights(path, arch, device, on_progress)
    weights = RequantizedWeights(file, quantization)
    source = WeightSource(weights, ops, dtype, WeightLedger())
    try:
        model = build(arch, source)
    finally:
        file.close()
    # What layers were given is not what the file holds: ggml's types come decoded, and the table of
    # a tied model twice.
    held = file.file_bytes(weights.made)
    for name, total in source.ledger.totals.items():
        total.stored_bytes = held[name]
    left = [name for name in file.unread() if not _is_ignorable_gguf(name, arch)]
    if left:
        raise _leftovers(path, left, arch, [])
    model.read_gb_per_s = file.nbytes_read / 1e9 / max(file.read_s, 1e-9)
    return model


def _is_ignorable_gguf(name: str, arch: LlamaArch) -> bool:
    """A layer that --num-layers leaves out."""
    match = _GGUF_LAYER.match(name)
    return match is not None and int(match[1]) >= arch.num_layers


def _refuse_leftovers(checkpoint: Checkpoint, arch: Arch, ranks: Ranks) -> None:
    left = checkpoint.unread(
        lambda name: is_ignorable(name, arch) or _is_of_another_rank(name, arch, ranks)
    )
    if left:
        raise _leftovers(checkpoint.folder, left, arch, checkpoint.names)


def _leftovers(model: Path, left: list[str], arch: Arch, names: list[str]) -> CheckpointError:
    others = f" and {len(left) - 1} more" if len(left) > 1 else ""
    return CheckpointError(
        f"{model} holds tensor '{left[0]}'{others}, which {arch.model_type} does not have; leaving "
        f"it out could change the output.{nearest(left[0], set(names) - set(left))}"
    )


def is_ignorable(name: str, arch: Arch) -> bool:
    """Is `name` a tensor that a checkpoint may hold and the main model rightly leaves out?

    Those are: the layers after the last one (multi-token prediction), indexers on layers that share
    another's choice (some conversions copy them everywhere), tables of rotary frequencies, and a
    copy of the embedding that a tied model's output is.
    """
    if name.endswith(".rotary_emb.inv_freq"):
        return True
    if isinstance(arch, LlamaArch) and arch.is_tied and name == "lm_head.weight":
        return True
    match = _LAYER.fullmatch(name)
    if match is None:
        return False
    layer, rest = int(match[1]), match[2]
    if isinstance(arch, LlamaArch):
        return layer >= arch.num_layers
    is_shared_indexer = (
        rest.startswith("self_attn.indexer.") and layer not in arch.indexer.full_layers
    )
    return layer >= arch.num_layers or is_shared_indexer


def _is_of_another_rank(name: str, arch: Arch, ranks: Ranks) -> bool:
    if isinstance(arch, LlamaArch):
        return False
    if name.startswith("model.embed_tokens."):
        return not ranks.is_first_stage
    if name.startswith(("model.norm.", "lm_head.")):
        return not ranks.is_last_stage
    match = _LAYER.fullmatch(name)
    if match is None:
        return False
    if int(match[1]) not in ranks.layers(arch.num_layers):
        return True
    expert = _EXPERT.fullmatch(match[2])
    return expert is not None and int(expert[1]) not in ranks.held(arch.moe.num_experts)
