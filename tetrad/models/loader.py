"""Fills a model from a checkpoint, and refuses one that does not fit exactly."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch

from tetrad.core.arch import ModelArch
from tetrad.core.errors import CheckpointError, nearest
from tetrad.core.ranks import Ranks
from tetrad.distributed.collectives import Collectives, Solo
from tetrad.formats.checkpoint import Checkpoint
from tetrad.kernels.select import OpSet
from tetrad.layers.source import WeightLedger, WeightSource
from tetrad.models.base import Model
from tetrad.models.registry import MODELS
from tetrad.models.shards import RankWeights

OnProgress = Callable[[int, int], None]
"""Called with (bytes read so far, bytes in the checkpoint)."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
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
) -> Model:
    """Load `folder` onto `device` ("cpu", "cuda") for activations of `dtype`: all of it, or what
    the rank of `others` holds, or of either only the first `num_layers`.

    Raises CheckpointError, in one sentence, when config.json is not of a supported model, when a
    tensor is missing or has another shape, or when one is left over that nobody knows.
    """
    others = others or Solo()
    arch = ModelArch.from_folder(folder).first_layers(num_layers)
    checkpoint = Checkpoint.open(folder, device, on_progress)
    weights = RankWeights(checkpoint, others.ranks)
    source = WeightSource(weights, ops, dtype, WeightLedger(), others=others)
    try:
        model = MODELS[arch.model_type](others.ranks.arch_of(arch), source)
    finally:
        checkpoint.close()
    _refuse_leftovers(checkpoint, arch, others.ranks)
    model.checkpoint_notes = tuple(checkpoint.notes)
    model.read_gb_per_s = checkpoint.nbytes_read / 1e9 / max(checkpoint.read_s, 1e-9)
    return model


def _refuse_leftovers(checkpoint: Checkpoint, arch: ModelArch, ranks: Ranks) -> None:
    left = checkpoint.unread(
        lambda name: is_ignorable(name, arch) or _is_of_another_rank(name, arch, ranks)
    )
    if not left:
        return
    known = set(checkpoint.names) - set(left)
    others = f" and {len(left) - 1} more" if len(left) > 1 else ""
    raise CheckpointError(
        f"{checkpoint.folder} holds tensor '{left[0]}'{others}, which {arch.model_type} does not "
        f"have; leaving it out could change the output.{nearest(left[0], known)}"
    )


def is_ignorable(name: str, arch: ModelArch) -> bool:
    """Is `name` a tensor that a checkpoint may hold and the main model rightly leaves out?

    Those are: the layers after the last one (multi-token prediction), indexers on layers that share
    another's choice (some conversions copy them everywhere), and tables of rotary frequencies.
    """
    if name.endswith(".rotary_emb.inv_freq"):
        return True
    match = _LAYER.fullmatch(name)
    if match is None:
        return False
    layer, rest = int(match[1]), match[2]
    is_shared_indexer = (
        rest.startswith("self_attn.indexer.") and layer not in arch.indexer.full_layers
    )
    return layer >= arch.num_layers or is_shared_indexer


def _is_of_another_rank(name: str, arch: ModelArch, ranks: Ranks) -> bool:
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
