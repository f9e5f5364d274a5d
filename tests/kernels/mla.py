"""What the tests of latent attention share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tetrad.kernels.contract import Case
from tetrad.kernels.registry import OPS

MLA = OPS["mla"]
Lens = tuple[tuple[int, int], ...]


def glm_case(name: str, lens: Lens, topk: int = 0, heads: int = 64) -> Case:
    """GLM-5's widths, drawn on the device."""
    return Case(name, {"lens": lens, "H": heads, "C": 512, "R": 64, "topk": topk}, True)


def drawn(case: Case, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The op's arguments."""
    return MLA.check.inputs(case, dtype, device)


def without_host_lengths(inputs: dict[str, Any]) -> dict[str, Any]:
    """As a CUDA graph has them: whoever reads a length on the host reads nonsense."""
    ragged = inputs["ragged"]
    lies = (-1,) * len(ragged.kv_lens_host)
    return inputs | {"ragged": replace(ragged, query_lens=lies, kv_lens_host=lies)}


def relative_error(ours: Tensor, truth: Tensor) -> float:
    """Relative L2."""
    truth = truth.to(ours.device)
    return float((ours.double() - truth).norm() / truth.norm())
