"""What the sampling rules mean, on distributions small enough to work out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tetrad.kernels.registry import OPS

sample = OPS["sample"].backends["torch"]

FALLING = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
ALMOST_ONE = 1.0 - 2.0**-24


def draw(
    logits: Tensor,
    uniform: float,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> int:
    arguments = (torch.tensor([value]) for value in (temperature, top_k, top_p, min_p, uniform))
    return int(sample(logits[None], *arguments))


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 0), (0.249, 0), (0.25, 1), (0.5, 2), (0.75, 3), (ALMOST_ONE, 3)]
)
def test_equal_tokens_share_the_line_in_order_of_their_ids(uniform: float, token: int):
    """Each owns a stretch that includes its left end and not its right."""
    assert draw(torch.zeros(4), uniform) == token


@pytest.mark.parametrize(("uniform", "token"), [(0.39, 0), (0.41, 1), (0.69, 1), (0.71, 2)])
def test_tokens_lie_in_order_of_their_ids_not_of_their_probabilities(uniform: float, token: int):
    assert draw(FALLING, uniform) == token
    assert draw(FALLING.flip(0), 1.0 - uniform) == 3 - token


@pytest.mark.parametrize("uniform", [0.0, 0.3, 0.6, ALMOST_ONE])
def test_what_is_dropped_leaves_no_gap(uniform: float):
    """Of 0.1, 0.4, 0.2, 0.3, the middle two ranks are ids 3 and 2; top-k 3 drops id 0."""
    mixed = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    expected = 1 if uniform < 4 / 9 else 2 if uniform < 6 / 9 else 3
    assert draw(mixed, uniform, top_k=3) == expected


@pytest.mark.parametrize(("top_k", "last"), [(0, 3), (1, 0), (2, 1), (4, 3), (99, 3)])
def test_top_k_keeps_the_first_k(top_k: int, last: int):
    assert draw(FALLING, ALMOST_ONE, top_k=top_k) == last


def test_top_k_takes_the_lower_ids_of_a_tie():
    tied = torch.tensor([1.0, 2.0, 2.0, 2.0])
    assert {draw(tied, u, top_k=2) for u in (0.0, 0.49, 0.51, ALMOST_ONE)} == {1, 2}


@pytest.mark.parametrize(
    ("top_p", "last"), [(1.0, 3), (0.91, 3), (0.89, 2), (0.41, 1), (0.39, 0), (1e-9, 0)]
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, last: int):
    assert draw(FALLING, ALMOST_ONE, top_p=top_p) == last


def test_top_p_counts_shares_of_what_top_k_left():
    """Of 0.4 and 0.3, the first holds 57 %."""
    assert draw(FALLING, ALMOST_ONE, top_k=2, top_p=0.5) == 0
    assert draw(FALLING, ALMOST_ONE, top_k=2, top_p=0.6) == 1


@pytest.mark.parametrize(("min_p", "last"), [(0.0, 3), (0.24, 3), (0.26, 2), (0.51, 1), (1.0, 0)])
def test_min_p_is_a_share_of_the_best(min_p: float, last: int):
    assert draw(FALLING, ALMOST_ONE, min_p=min_p) == last


def test_temperature_bends_the_distribution():
    """At temperature 0.5 the odds are squared: 16, 9, 4, 1 of 30."""
    assert draw(FALLING, 15.9 / 30, temperature=0.5) == 0
    assert draw(FALLING, 16.1 / 30, temperature=0.5) == 1
    assert draw(FALLING, 25.1 / 30, temperature=0.5) == 2


def test_greedy_takes_the_lowest_id_of_a_tie():
    tied = torch.tensor([[0.0, 3.0, 1.0, 3.0]])
    assert int(sample(tied, None)) == 1
    assert draw(tied[0], ALMOST_ONE, temperature=0.0) == 1


def test_a_row_does_not_depend_on_its_batch():
    generator = torch.Generator().manual_seed(0)
    rows = 50
    arguments = (
        torch.randn(rows, 200, generator=generator) * 3,
        torch.rand(rows, generator=generator).mul(2).floor(),
        torch.randint(0, 30, (rows,), generator=generator),
        torch.rand(rows, generator=generator).clamp(min=0.1),
        torch.rand(rows, generator=generator) * 0.2,
        torch.rand(rows, generator=generator),
    )
    together = sample(*arguments)
    alone = torch.cat([sample(*(a[i : i + 1] for a in arguments)) for i in range(rows)])
    assert torch.equal(together, alone)
    assert len(set(together.tolist())) > 20
