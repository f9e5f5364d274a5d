"""What `tetrad quantize` was asked."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tetrad.core.option import Config, option

ROUTED_EXPERTS = ("*.mlp.experts.*",)


class QuantizeConfig(Config):
    """Options of `tetrad quantize`."""

    source: Path = option(..., "Folder of the bf16, fp16 or fp32 checkpoint.", group="Model")
    target: Path = option(..., "Folder to write the NVFP4 checkpoint to.", group="Model")
    include: tuple[str, ...] = option(
        ROUTED_EXPERTS,
        "Glob patterns over whole module names, which linears become NVFP4; the "
        "default is the routed experts of every layer.",
        group="Choice",
    )
    exclude: tuple[str, ...] = option(
        (),
        "Glob patterns over whole module names: which of those stay as they are.",
        group="Choice",
    )
    force: bool = option(False, "Replace the checkpoint that the target holds.", group="Output")
    max_shard_gb: float = option(
        5.0, "Largest file to write, in GB.", group="Output", gt=0, le=1_000_000
    )
    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "Where to compute; auto takes the GPU when there is one.", group="Output"
    )
