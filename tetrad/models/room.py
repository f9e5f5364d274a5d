"""Does a checkpoint fit into a device? Known from its headers, before minutes of preparing."""

from __future__ import annotations

import re
from itertools import accumulate
from pathlib import Path

from tetrad.core.architectures import Arch
from tetrad.core.errors import ConfigError
from tetrad.formats.checkpoint import Checkpoint
from tetrad.models.loader import is_ignorable

CUT_SHARE = 0.75
"""Of a device's memory, what weights may take so that a cache and steps fit beside them."""
_LAYER = re.compile(r"model\.layers\.(\d+)\..+")


def check_room(folder: Path, arch: Arch, total_bytes: int) -> None:
    """Raises ConfigError where the weights of `folder`, which no device holds in fewer bytes than
    they are stored in, are more than the `total_bytes` of a device; CheckpointError as
    `Checkpoint.open`. What else is in the device's memory shows when it is allocated."""
    if sum(path.stat().st_size for path in folder.glob("*.safetensors")) <= total_bytes:
        return
    checkpoint = Checkpoint.open(folder)
    others, by_layer = 0, [0] * arch.num_layers
    for name in checkpoint.names:
        if is_ignorable(name, arch):
            continue
        layer, num_bytes = _LAYER.fullmatch(name), checkpoint.stored(name).nbytes
        if layer is None:
            others += num_bytes
        else:
            by_layer[int(layer[1])] += num_bytes
    needed = others + sum(by_layer)
    if needed <= total_bytes:
        return
    fitting = sum(others + held <= CUT_SHARE * total_bytes for held in accumulate(by_layer))
    cut = f"--num-layers {fitting} serves its first layers, whose text means nothing, and "
    raise ConfigError(
        f"The weights of {folder} take {needed / 1e9:.3g} GB, and this version runs on one device, "
        f"which has {total_bytes / 1e9:.3g} GB: {cut if fitting else ''}`tetrad bench rank` "
        "measures one rank of a deployment that shares such a model."
    )
