"""Routing and activation in one launch: of a token's programs the first routes it, the others take
a stretch of columns each. Both are short, and neither needs the other."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.kernels import chain
from tetrad.kernels.backend import Backend
from tetrad.kernels.route.triton import num_warps_of, route_token, rule_of, slots_for
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
    joined, bias, weights, ids, hidden, scaling,
    RULE: tl.constexpr, WIDTH: tl.constexpr, STRETCH: tl.constexpr,
):  # fmt: skip
    """A row of `joined` holds a token's logits, gate and up; RULE: `rule_of`."""
    chain.after_previous()
    NUM_EXPERTS: tl.constexpr = RULE[0]
    NUM_SLOTS: tl.constexpr = RULE[1]
    token = tl.program_id(0).to(tl.int64)
    row = joined + token * (NUM_EXPERTS + 2 * WIDTH)
    part = tl.program_id(1)
    chain.before_next()
    if part == 0:
        at = token * NUM_SLOTS
        route_token(row, bias, weights + at, ids + at, scaling, RULE)
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
    weights_into: Tensor | None = None,
    ids_into: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`joined` and what is written into must be contiguous."""
    assert joined.is_contiguous()
    num_tokens, num_experts = len(joined), len(bias)
    width = (joined.shape[1] - num_experts) // 2
    weights, ids = slots_for(joined, experts_per_token, weights_into, ids_into)
    hidden = joined.new_empty(num_tokens, width, dtype=dtype)
    rule = rule_of(num_experts, experts_per_token, num_groups, groups_per_token, normalise, held)
    num_warps = num_warps_of(rule)
    stretch = min(num_warps * COLUMNS_PER_WARP, next_power_of_2(width))
    route_activate_kernel[(num_tokens, 1 + cdiv(width, stretch))](
        joined, bias, weights, ids, hidden, scaling, rule, width, stretch,
        num_warps=num_warps, **chain.options(),
    )  # fmt: skip
    return weights, ids, hidden


BACKEND = Backend("triton", run, why_not)
