"""Inputs of grouping slots, and the answer slot by slot."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tetrad.kernels.backend import Check
from tetrad.kernels.contract import Case
from tetrad.kernels.draw import Draw


def inputs(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Tokens choose among the first `used` experts; a share of the slots is dropped."""
    draw = Draw.of(case, dtype, device)
    chosen = [draw.permutation(case["used"])[: case["K"]] for _ in range(case["T"])]
    ids = torch.stack(chosen)
    ids[draw.uniform(*ids.shape) < case["dropped"]] = -1
    return {
        "ids": ids,
        "num_experts": case["E"],
        "block": case["block"],
        "small_block": case["small_block"],
    }


def expected(inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """One list per expert, cut into tiles."""
    flat, num_experts, block, small_block = (
        inputs["ids"].flatten().tolist(),
        *list(inputs.values())[1:],
    )
    lots: list[tuple[int, int, list[int]]] = []
    for expert in range(num_experts):
        slots = [slot for slot, chosen in enumerate(flat) if chosen == expert]
        if slots:
            tiles = math.ceil(len(slots) / block)
            if len(slots) / (tiles * block) < 0.8:
                tiles = math.ceil(len(slots) / small_block)
            lots.append((math.ceil(len(slots) / tiles), expert, slots))
    rows: list[int] = []
    tile_expert: list[int] = []
    num_large = 0
    for each, expert, slots in sorted(lots, key=lambda lot: (-lot[0], lot[1])):
        while slots:
            tile, slots = slots[:each], slots[each:]
            rows += tile + [-1] * (block - len(tile))
            tile_expert.append(expert)
            num_large += each > small_block
    num_tiles = len(tile_expert)
    at_most = min(len(flat), num_experts) + max(0, len(flat) - num_experts) // small_block
    unused = at_most - num_tiles
    rows += [-1] * (unused * block)
    tile_expert += [-1] * unused
    return torch.tensor(rows), torch.tensor(tile_expert), torch.tensor([num_large, num_tiles])


CHECK = Check(inputs, expected, outputs=tuple)
