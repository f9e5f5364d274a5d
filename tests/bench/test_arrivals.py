"""The offered load is what was asked for."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

import pytest

from tetrad.bench.workload.arrivals import schedule


def test_an_infinite_rate_sends_all_at_once():
    assert schedule(3, math.inf, seed=1) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("rate", [0.5, 4.0, 999.0])
def test_the_offered_rate_is_exact(rate: float):
    due = schedule(101, rate, seed=1)
    assert due[0] == 0.0
    assert due[-1] == pytest.approx(100 / rate)
    assert due == sorted(due)


def test_the_same_seed_gives_the_same_schedule_and_another_seed_another():
    assert schedule(50, 4.0, seed=7) == schedule(50, 4.0, seed=7)
    assert schedule(50, 4.0, seed=7) != schedule(50, 4.0, seed=8)


def test_gaps_are_exponential():
    """Mean and standard deviation of an exponential distribution are equal."""
    due = schedule(20_001, 10.0, seed=3)
    gaps = [after - before for before, after in pairwise(due)]
    assert statistics.fmean(gaps) == pytest.approx(0.1)
    assert statistics.pstdev(gaps) == pytest.approx(0.1, rel=0.05)


def test_one_request_needs_no_schedule():
    assert schedule(1, 4.0, seed=1) == [0.0]
