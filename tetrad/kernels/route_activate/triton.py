"""Routing and activation in one launch: of a token's programs the first routes it, the others take
a stretch of columns each. Both are short, and neither needs the other."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.kernels.backend import Backend
from tetrad.kernels.route.triton import num_warps_of, route_token
from tetrad.kernels.triton_support import cdiv, jit, next_power_of_2, tl, why_not

COLUMNS_PER_WARP = 256
"""Of the activation: eight for each thread."""


@jit()
def _activate(gate, up, hidden, first, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """silu(gate) * up for COLUMNS columns from `first` on."""
    column = first + tl.arange(0, COLUMNS)
    is_inside = column < WIDTH
    g = tl.load(gate + column, mask=is_inside, other=0.0)
    u = tl.load(up + column, mask=is_inside, other=0.0)
    result = g / (1.0 + tl.exp(-g)) * u
    tl.store(hidden + column, result.to(hidden.dtype.element_ty), mask=is_inside)


@jit()
def route_activate_kernel(
    joined,
    bias,
    weights,
    ids,
    hidden,
    scaling,
    NUM_EXPERTS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    FIRST_HELD: tl.constexpr,
    NUM_HELD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NORMALISE: tl.constexpr,
    WIDTH: tl.constexpr,
    STRETCH: tl.constexpr,
):
    """A row of `joined` holds a token's logits, gate and up."""
    token = tl.program_id(0).to(tl.int64)
    row = joined + token * (NUM_EXPERTS + 2 * WIDTH)
    part = tl.program_id(1)
    if part == 0:
        at = token * NUM_SLOTS
        route_token(
            row, bias, weights + at, ids + at, scaling,
            NUM_EXPERTS, NUM_SLOTS, NUM_GROUPS, CHOSEN_GROUPS, FIRST_HELD, NUM_HELD,
            ROWS, COLUMNS, NORMALISE,
        )  # fmt: skip
    else:
        gate = row + NUM_EXPERTS
        first = (part - 1) * STRETCH
        _activate(gate, gate + WIDTH, hidden + token * WIDTH, first, WIDTH, STRETCH)


def run(
    joined: Tensor,
    bias: Tensor,
    experts_per_token: int,
    num_groups: int,
    groups_per_token: int,
    normalise: bool,
    scaling: float,
    held: range | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """`joined` must be contiguous."""
    assert joined.is_contiguous()
    num_tokens, num_experts = len(joined), len(bias)
    width = (joined.shape[1] - num_experts) // 2
    weights = joined.new_empty(num_tokens, experts_per_token)
    ids = joined.new_empty(num_tokens, experts_per_token, dtype=torch.int64)
    hidden = joined.new_empty(num_tokens, width, dtype=dtype)
    rows, columns = next_power_of_2(num_groups), next_power_of_2(num_experts // num_groups)
    num_warps = num_warps_of(rows * columns)
    stretch = min(num_warps * COLUMNS_PER_WARP, next_power_of_2(width))
    held = range(num_experts) if held is None else held
    route_activate_kernel[(num_tokens, 1 + cdiv(width, stretch))](
        joined,
        bias,
        weights,
        ids,
        hidden,
        scaling,
        num_experts,
        experts_per_token,
        num_groups,
        groups_per_token,
        held.start,
        len(held),
        rows,
        columns,
        normalise,
        width,
        stretch,
        num_warps=num_warps,
    )
    return weights, ids, hidden


BACKEND = Backend("triton", run, why_not)
