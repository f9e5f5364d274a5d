"""Routing: one warp per token holds all scores and takes the best one K times."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.kernels.backend import Backend
from tetrad.kernels.triton_support import jit, next_power_of_2, tl, why_not


@jit()
def _best_groups(choice, ROWS: tl.constexpr, NUM_GROUPS: tl.constexpr, CHOSEN: tl.constexpr):
    """[ROWS, 1], 1 for the best groups; a group is as good as its two best experts together."""
    member = tl.arange(0, choice.shape[1])[None, :]
    best = tl.max(choice, axis=1)
    others = tl.where(member == tl.argmax(choice, axis=1)[:, None], float("-inf"), choice)
    group = tl.arange(0, ROWS)
    merit = tl.where(group < NUM_GROUPS, best + tl.max(others, axis=1), float("-inf"))
    is_kept = tl.zeros([ROWS], tl.int32)
    for _ in tl.static_range(CHOSEN):
        found = tl.argmax(tl.where(is_kept == 0, merit, float("-inf")), axis=0)
        is_kept = tl.where(group == found, 1, is_kept)
    return is_kept[:, None]


@jit()
def route_token(
    logits,
    bias,
    weights,
    ids,
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
):
    """One token: `logits`, `weights` and `ids` point to its rows.

    Scores lie in a tile [ROWS, COLUMNS], a group in each row. Equal ones: the first counts.
    """
    group_size: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    group = tl.arange(0, ROWS)[:, None]
    member = tl.arange(0, COLUMNS)[None, :]
    expert = group * group_size + member
    is_real = (group < NUM_GROUPS) & (member < group_size)
    logit = tl.load(logits + expert, mask=is_real, other=0.0)
    score = 1.0 / (1.0 + tl.exp(-logit))
    choice = score + tl.load(bias + expert, mask=is_real, other=0.0)
    # A NaN comes first, as in a sort, and shows in the weights.
    choice = tl.where(choice == choice, choice, float("inf"))
    choice = tl.where(is_real, choice, float("-inf"))
    if NUM_GROUPS > 1:
        is_kept = _best_groups(choice, ROWS, NUM_GROUPS, CHOSEN_GROUPS)
        choice = tl.where(is_kept != 0, choice, float("-inf"))

    place = tl.arange(0, ROWS * COLUMNS)
    choice = tl.reshape(choice, [ROWS * COLUMNS])
    score = tl.reshape(score, [ROWS * COLUMNS])
    slot = tl.full([ROWS * COLUMNS], NUM_SLOTS, tl.int32)
    for k in tl.static_range(NUM_SLOTS):
        is_best = place == tl.argmax(choice, axis=0)
        slot = tl.where(is_best, k, slot)
        choice = tl.where(is_best, float("-inf"), choice)
    is_chosen = slot < NUM_SLOTS
    if NORMALISE:
        score = score / (tl.sum(tl.where(is_chosen, score, 0.0)) + 1e-20)
    chosen = place // COLUMNS * group_size + place % COLUMNS - FIRST_HELD
    chosen = tl.where((chosen >= 0) & (chosen < NUM_HELD), chosen, -1)
    tl.store(weights + slot, score * scaling, mask=is_chosen)
    tl.store(ids + slot, chosen.to(tl.int64), mask=is_chosen)


@jit()
def route_kernel(
    logits,
    bias,
    weights,
    ids,
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
):
    """A program per token; see `route_token`."""
    token = tl.program_id(0).to(tl.int64)
    at = token * NUM_SLOTS
    route_token(
        logits + token * NUM_EXPERTS, bias, weights + at, ids + at, scaling,
        NUM_EXPERTS, NUM_SLOTS, NUM_GROUPS, CHOSEN_GROUPS, FIRST_HELD, NUM_HELD,
        ROWS, COLUMNS, NORMALISE,
    )  # fmt: skip


def num_warps_of(num_scores: int) -> int:
    """Warps that hold one token's scores."""
    return 1 if num_scores <= 512 else 4


def run(
    logits: Tensor,
    bias: Tensor,
    experts_per_token: int,
    num_groups: int,
    groups_per_token: int,
    normalise: bool,
    scaling: float,
    held: range | None = None,
) -> tuple[Tensor, Tensor]:
    """`logits` must be contiguous."""
    assert logits.is_contiguous()
    num_tokens, num_experts = logits.shape
    weights = logits.new_empty(num_tokens, experts_per_token)
    ids = logits.new_empty(num_tokens, experts_per_token, dtype=torch.int64)
    rows, columns = next_power_of_2(num_groups), next_power_of_2(num_experts // num_groups)
    held = range(num_experts) if held is None else held
    route_kernel[(num_tokens,)](
        logits,
        bias,
        weights,
        ids,
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
        num_warps=num_warps_of(rows * columns),
    )
    return weights, ids


BACKEND = Backend("triton", run, why_not)
