"""What surrounds the two grouped products of a step, whoever computes them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tetrad.kernels.experts.prepared import GroupedExperts
from tetrad.kernels.experts.tiles import Capability, TileShape
from tetrad.kernels.reduce_experts import triton as reduce_experts
from tetrad.kernels.sort_tokens import triton as sort_tokens

Routed = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""The op's arguments `ids`, `slot_weights`, `shared` and `residual`."""


@dataclass(frozen=True, eq=False)
class Grouping:
    """The rows of a step in tiles, as `sort_tokens` returns them, and how tiles are computed."""

    rows: Tensor
    tile_expert: Tensor
    num_tiles: Tensor
    num_slots: int
    tile: TileShape
    capability: Capability
    num_cores: int
    """Multiprocessors: as many programs as a persistent kernel has."""


@functools.cache
def cores_of(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 where kernels are interpreted or only compiled."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def in_groups(
    x: Tensor,
    weight: GroupedExperts,
    routed: Routed,
    tile: TileShape,
    capability: Capability,
    product: Callable[..., None],
) -> Tensor:
    """The experts' output [T, D]; what the products give is summed, `shared` and `residual` too.

    `product(x, operand, grouping, out, is_gate_up=...)` launches one grouped product.
    """
    ids, slot_weights, shared, residual = routed
    num_tokens, num_slots = ids.shape
    ids = ids.contiguous()
    sorted_rows = sort_tokens.run(ids, weight.num_experts, tile.block, tile.small_block)
    grouping = Grouping(*sorted_rows, num_slots, tile, capability, cores_of(x.device))
    hidden = x.new_empty(len(grouping.rows), weight.gate_up.features)
    product(x.contiguous(), weight.gate_up, grouping, hidden, is_gate_up=True)
    by_slot = x.new_empty(num_tokens * num_slots, weight.down.features)
    product(hidden, weight.down, grouping, by_slot, is_gate_up=False)
    shared, residual = (
        added if added is None else added.contiguous() for added in (shared, residual)
    )
    return reduce_experts.run(by_slot, ids, slot_weights.contiguous(), shared, residual)
