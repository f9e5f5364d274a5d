"""What the tests of the indexer's kernels share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tetrad.core.keys import ACTIVATION, KeyFormat
from tetrad.kernels.contract import case
from tetrad.kernels.draw import Lens
from tetrad.kernels.ragged import Ragged
from tetrad.kernels.registry import OPS

SCORE, SELECT = OPS["index_score"], OPS["index_select"]
MIXED: Lens = ((1, 130), (5, 5), (1, 1), (20, 131), (2, 65), (1, 7), (1, 64))


def step_inputs(
    lens: Lens,
    heads: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    keys: KeyFormat = ACTIVATION,
) -> dict[str, Any]:
    """Arguments of `index_score`; unwritten slots are NaN."""
    step = case(f"step {lens}", lens=lens, X=heads, I=width, keys=keys)
    return SCORE.check.inputs(step, dtype, device)


def with_kv_lens(ragged: Ragged, kv_lens: list[int]) -> Ragged:
    """Other lengths on the device than the host knows: the host's are a graph's longest."""
    return replace(ragged, kv_lens=ragged.kv_lens.new_tensor(kv_lens))


def tied_scores(num_rows: int, num_keys: int, seed: int, device: torch.device) -> Tensor:
    """Few different scores, or one, or none: each row of another kind; both zeros, some NaN."""
    generator = torch.Generator(device).manual_seed(seed)
    scores = torch.randn(num_rows, num_keys, generator=generator, device=device)
    scores[1::5] = (scores[1::5] * 2).round() / 2
    scores[2::5] = 0.0
    scores[2::5, ::2] = -0.0
    scores[3::5, 1:] = -torch.inf
    scores[4::5] = torch.where(scores[4::5] > 1.0, torch.nan, scores[4::5].round())
    return scores


def sorted_rows(selected: Tensor) -> Tensor:
    return selected.sort(dim=-1).values
