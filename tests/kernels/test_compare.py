"""What passes for equal."""

from __future__ import annotations

import math

import pytest
import torch

from tetrad.kernels.compare import compare

INF, NAN = math.inf, math.nan


def test_equal_tensors_are_exact():
    result = compare(torch.tensor([1.0, -INF, 3.0]), torch.tensor([1.0, -INF, 3.0]))
    assert result.is_exact
    assert result.passes(0.0)
    assert result.cosine == pytest.approx(1.0)


def test_the_error_is_relative_to_the_whole():
    result = compare(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))
    assert result.relative_l2 == pytest.approx(0.1)
    assert result.max_abs == pytest.approx(0.5)
    assert result.passes(0.11)
    assert not result.passes(0.09)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        ([NAN, 1.0], [NAN, 1.0]),
        ([NAN, 1.0], [0.0, 1.0]),
        ([0.0, 1.0], [NAN, 1.0]),
        ([INF, 1.0], [0.0, 1.0]),
        ([0.0, 1.0], [INF, 1.0]),
        ([INF, 1.0], [-INF, 1.0]),
        ([NAN, 1.0], [-INF, 1.0]),
        ([1.0], [1.0, 1.0]),
    ],
)
def test_what_can_never_pass(actual: list[float], expected: list[float]):
    result = compare(torch.tensor(actual), torch.tensor(expected))
    assert not result.passes(math.inf)
    assert not result.is_exact


def test_zeros_compare_absolutely():
    assert compare(torch.zeros(3), torch.zeros(3)).passes(0.0)
    assert not compare(torch.full((3,), 1e-3), torch.zeros(3)).passes(1e-6)


def test_integers_and_empty_tensors():
    assert compare(torch.tensor([1, 2]), torch.tensor([1, 2])).is_exact
    assert not compare(torch.tensor([2, 1]), torch.tensor([1, 2])).passes(0.0)
    assert compare(torch.empty(0), torch.empty(0)).is_exact
