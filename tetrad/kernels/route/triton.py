"""Routing: one warp per token holds all scores and takes the best one K times."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.kernels import chain
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
def route_token(logits, bias, weights, ids, scaling, RULE: tl.constexpr):
    """One token: `logits`, `weights` and `ids` point to its rows; RULE: `rule_of`.

    Scores lie in a tile [ROWS, COLUMNS], a group in each row. Equal ones: the first counts.
    """
    NUM_EXPERTS: tl.constexpr = RULE[0]
    NUM_SLOTS: tl.constexpr = RULE[1]
    NUM_GROUPS: tl.constexpr = RULE[2]
    CHOSEN_GROUPS: tl.constexpr = RULE[3]
    NORMALISE: tl.constexpr = RULE[4]
    FIRST_HELD: tl.constexpr = RULE[5]
    NUM_HELD: tl.constexpr = RULE[6]
    ROWS: tl.constexpr = RULE[7]
    COLUMNS: tl.constexpr = RULE[8]
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
def route_kernel(logits, bias, weights, ids, scaling, RULE: tl.constexpr):
    """A program per token; see `route_token`."""
    chain.after_previous()
    token = tl.program_id(0).to(tl.int64)
    NUM_EXPERTS: tl.constexpr = RULE[0]
    NUM_SLOTS: tl.constexpr = RULE[1]
    at = token * NUM_SLOTS
    chain.before_next()
    route_token(logits + token * NUM_EXPERTS, bias, weights + at, ids + at, scaling, RULE)


def rule_of(
    num_experts: int,
    num_slots: int,
    num_groups: int,
    groups_per_token: int,
    normalise: bool,
    held: range | None,
) -> tuple[int, ...]:
    """What a kernel is compiled for; last the sizes of the tile that holds a token's scores."""
    held = range(num_experts) if held is None else held
    sizes = next_power_of_2(num_groups), next_power_of_2(num_experts // num_groups)
    return (
        num_experts, num_slots, num_groups, groups_per_token, normalise, held.start, len(held),
        *sizes,
    )  # fmt: skip


def num_warps_of(rule: tuple[int, ...]) -> int:
    """Warps that hold one token's scores."""
    return 1 if rule[-2] * rule[-1] <= 512 else 4


def slots_for(
    logits: Tensor, num_slots: int, weights: Tensor | None, ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Weights [T, K] and ids [T, K]: those that are given, and new ones for None."""
    num_tokens = len(logits)
    if weights is None:
        weights = logits.new_empty(num_tokens, num_slots)
    if ids is None:
        ids = logits.new_empty(num_tokens, num_slots, dtype=torch.int64)
    assert weights.is_contiguous()
    assert ids.is_contiguous()
    return weights, ids


def run(
    logits: Tensor,
    bias: Tensor,
    experts_per_token: int,
    num_groups: int,
    groups_per_token: int,
    normalise: bool,
    scaling: float,
    held: range | None = None,
    weights_into: Tensor | None = None,
    ids_into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`logits` and what is written into must be contiguous."""
    assert logits.is_contiguous()
    rule = rule_of(len(bias), experts_per_token, num_groups, groups_per_token, normalise, held)
    weights, ids = slots_for(logits, experts_per_token, weights_into, ids_into)
    route_kernel[(len(logits),)](
        logits, bias, weights, ids, scaling, rule, num_warps=num_warps_of(rule), **chain.options()
    )
    return weights, ids


BACKEND = Backend("triton", run, why_not)
