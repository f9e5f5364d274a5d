"""Sampling among the best few gives what sorting everything gives."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tetrad.kernels.sample import candidates, reference

ROWS, VOCAB = 64, 3000


def drawn(spread: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(int(10 * spread))
    logits = torch.randn(ROWS, VOCAB, generator=generator) * spread
    return logits, torch.rand(ROWS, generator=generator)


def assert_equal(logits: Tensor, rules: Sequence[Tensor]) -> None:
    temperature, top_k, top_p, min_p, uniform = rules
    ours, theirs = (
        backend.run(logits, temperature, top_k, top_p, min_p, uniform)
        for backend in (candidates, reference)
    )
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("top_k", [0, 1, 40, 256, 900, VOCAB])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.05])
def test_tokens_are_the_references(spread: float, top_k: int, top_p: float, min_p: float):
    logits, uniform = drawn(spread)
    heat = torch.linspace(0.0, 2.0, ROWS)
    rules = [torch.full((ROWS,), rule) for rule in (top_k, top_p, min_p)]
    assert_equal(logits, [heat, *rules, uniform])


def test_ties_at_every_place():
    """A few values only: whatever a rule cuts, it cuts among equals."""
    logits, uniform = drawn(1.0)
    logits = logits.round()
    for top_k in (3, 100, 255, 256):
        rules = [torch.full((ROWS,), rule) for rule in (0.8, top_k, 0.9, 0.0)]
        assert_equal(logits, [*rules, uniform])


def test_the_last_number_finds_a_token_that_has_a_share():
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, 5:9] = 1.0
    rules = [torch.tensor([rule]) for rule in (1.0, 0, 1.0, 0.0)]
    temperature, top_k, top_p, min_p = rules
    ids = candidates.run(logits, temperature, top_k, top_p, min_p, torch.tensor([1.0]))
    assert ids.tolist() == [8]
