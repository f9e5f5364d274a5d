"""What the tests of latent attention share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tetrad.core.keys import ACTIVATION, KeyFormat
from tetrad.core.step import PAGE_TOKENS
from tetrad.formats import fp8_keys
from tetrad.kernels.contract import Case
from tetrad.kernels.draw import rows_of
from tetrad.kernels.registry import OPS

MLA = OPS["mla"]
SMALL_CASES = [each for each in MLA.contract.cases if each["C"] < 512]
Lens = tuple[tuple[int, int], ...]


def glm_case(
    name: str, lens: Lens, topk: int = 0, heads: int = 64, keys: KeyFormat = ACTIVATION
) -> Case:
    """GLM-5's widths, drawn on the device."""
    values = {"lens": lens, "H": heads, "C": 512, "R": 64, "topk": topk, "keys": keys}
    return Case(name, values, True)


def drawn(case: Case, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The op's arguments."""
    return MLA.check.inputs(case, dtype, device)


def without_host_lengths(inputs: dict[str, Any]) -> dict[str, Any]:
    """As a CUDA graph has them: whoever reads a length on the host reads nonsense."""
    ragged = inputs["ragged"]
    lies = (-1,) * len(ragged.kv_lens_host)
    return inputs | {"ragged": replace(ragged, query_lens=lies, kv_lens_host=lies)}


def with_lengths_elsewhere(inputs: dict[str, Any]) -> dict[str, Any]:
    """With `kv_lens` four bytes behind an aligned address, as they may lie in a step's integers."""
    lens = inputs["ragged"].kv_lens
    moved = torch.empty(len(lens) + 1, dtype=torch.int32, device=lens.device)[1:].copy_(lens)
    return inputs | {"ragged": replace(inputs["ragged"], kv_lens=moved)}


def exact(inputs: dict[str, Any]) -> Tensor:
    """[T, H, C] float64 where the inputs lie; the op's own check would take minutes."""
    ragged, selected = inputs["ragged"], inputs["selected"]
    queries: Tensor = inputs["queries"].double()
    flat: Tensor = inputs["pool"].flatten(0, 1)
    rank = inputs["latent_rank"]
    if flat.dtype == torch.uint8:
        flat = fp8_keys.decode_latents(flat, rank)
    out = queries.new_zeros(*queries.shape[:2], rank)
    for row, sequence, seen in rows_of(ragged):
        position = torch.arange(seen, device=flat.device)
        if selected is not None:
            position = selected[row][selected[row] >= 0].long()
        pages = ragged.page_table[sequence].long()
        keys = flat[pages[position // PAGE_TOKENS] * PAGE_TOKENS + position % PAGE_TOKENS].double()
        if len(keys):
            weights = (queries[row] @ keys.T * inputs["scale"]).softmax(-1)
            out[row] = weights @ keys[:, :rank]
    return out


def relative_error(ours: Tensor, truth: Tensor) -> float:
    """Relative L2 of the worst row; absolute where the truth is zero."""
    error = (ours.double() - truth).flatten(1).norm(dim=1)
    size = truth.flatten(1).norm(dim=1)
    return float((error / torch.where(size > 0, size, 1.0)).max())
