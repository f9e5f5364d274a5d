"""Inputs of grouping slots, and the answer slot by slot."""

from __future__ import annotations

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
    return {"ids": ids, "num_experts": case["E"], "block": case["block"]}


def expected(inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """One list per expert, cut into tiles."""
    flat, num_experts, block = inputs["ids"].flatten().tolist(), *list(inputs.values())[1:]
    rows: list[int] = []
    tile_expert: list[int] = []
    for expert in range(num_experts):
        slots = [slot for slot, chosen in enumerate(flat) if chosen == expert]
        tiles = -(-len(slots) // block)
        each = -(-len(slots) // max(tiles, 1))
        while slots:
            tile, slots = slots[:each], slots[each:]
            rows += tile + [-1] * (block - len(tile))
            tile_expert.append(expert)
    num_tiles = len(tile_expert)
    at_most = sum(1 for _ in range(min(len(flat), num_experts)))
    at_most += max(0, len(flat) - num_experts) // block
    unused = at_most - num_tiles
    rows += [-1] * (unused * block)
    tile_expert += [-1] * unused
    return torch.tensor(rows), torch.tensor(tile_expert), torch.tensor([num_tiles])


CHECK = Check(inputs, expected, outputs=tuple)
