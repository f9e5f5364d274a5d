"""Any load that can be asked for is offered exactly, whatever the gaps."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tetrad.bench.options.serve import BenchServeConfig
from tetrad.bench.workload.arrivals import due_times, in_words, offered_rate, schedule
from tetrad.bench.workload.rates import Piece, covered, parse_profile, when
from tetrad.bench.workload.requests import Prompt

RATES = st.floats(0.1, 1000)
SECONDS = st.floats(0.1, 1000)
STARTS = st.floats(0, 1000).map(lambda rate: 0.0 if rate < 0.01 else rate)
PIECES = st.lists(st.builds(Piece, STARTS, RATES, SECONDS), min_size=1, max_size=5)
SHAPES = st.one_of(st.just(1.0), st.just(math.inf), st.floats(0.05, 50))


def offered(pieces: list[Piece], time_s: float) -> float:
    """Requests due until `time_s`: the integral of the rate."""
    total = 0.0
    for piece in pieces:
        spent = min(time_s, piece.seconds)
        rate = piece.first + (piece.last - piece.first) * spent / piece.seconds
        total += (piece.first + rate) / 2 * spent
        time_s -= spent
    return total + time_s * pieces[-1].last


@given(PIECES, st.floats(0, 1e6))
def test_when_is_the_inverse_of_what_was_offered(pieces: list[Piece], place: float):
    time_s = when(pieces, place)
    assert time_s >= 0
    assert offered(pieces, time_s) == pytest.approx(place, rel=1e-6, abs=1e-6)


@given(PIECES, SHAPES, st.integers(2, 60), st.integers(0, 9))
def test_a_profile_is_offered_exactly(pieces, shape: float, count: int, seed: int):
    due = schedule(count, math.inf, seed, burstiness=shape, pieces=pieces)
    assert len(due) == count
    assert due[0] == 0.0
    assert all(before <= after for before, after in pairwise(due))
    assert offered(pieces, due[-1]) == pytest.approx(count - 1, rel=1e-6)
    assert due == schedule(count, math.inf, seed, burstiness=shape, pieces=pieces)


@given(RATES, SHAPES, st.integers(2, 60), st.integers(0, 9))
def test_a_rate_is_offered_exactly(rate: float, shape: float, count: int, seed: int):
    due = schedule(count, rate, seed, burstiness=shape)
    assert due[-1] == pytest.approx((count - 1) / rate)
    assert all(before <= after for before, after in pairwise(due))


def test_gaps_have_the_spread_of_their_shape():
    """The standard deviation of a gamma distribution is its mean over the root of its shape."""
    for shape in (0.25, 1.0, 4.0):
        due = schedule(20_001, 10.0, seed=3, burstiness=shape)
        gaps = [after - before for before, after in pairwise(due)]
        assert statistics.fmean(gaps) == pytest.approx(0.1)
        assert statistics.pstdev(gaps) == pytest.approx(0.1 / math.sqrt(shape), rel=0.07)
    even = schedule(5, 10.0, seed=3, burstiness=math.inf)
    assert even == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])


def test_steps_and_a_ramp():
    pieces = parse_profile(("2:2", "0-4:2"))
    assert pieces == [Piece(2, 2, 2), Piece(0, 4, 2)]
    assert covered(pieces) == 9
    due = schedule(13, math.inf, 1, burstiness=math.inf, pieces=pieces)
    assert due[:5] == pytest.approx([0, 0.5, 1, 1.5, 2])
    assert due[5] == pytest.approx(3)  # 4 * t / 2 * t / 2 is 1 after one second of the ramp
    assert due[8:] == pytest.approx([4, 4.25, 4.5, 4.75, 5])


@pytest.mark.parametrize("word", ["", "5", "5:", ":5", "a:5", "5-:3", "-5:3", "1.2.3:4", "1e3:5"])
def test_what_is_no_piece_is_named(word: str):
    with pytest.raises(ValueError, match="is no piece of a rate profile"):
        parse_profile(("5:1", word))


def test_a_piece_in_which_nothing_is_due():
    for word in ("0:5", "5:0"):
        with pytest.raises(ValueError, match="no request is due"):
            parse_profile((word,))


def test_only_openers_have_a_place_in_the_schedule():
    prompts = [Prompt(1), Prompt(1, after=0), Prompt(1), Prompt(1, after=2), Prompt(1)]
    config = BenchServeConfig(request_rate=2.0, burstiness=math.inf)
    assert due_times(config, prompts, seed=1) == [0.0, 0.0, 0.5, 0.0, 1.0]


def test_a_trace_is_followed_and_told(tmp_path):
    prompts = [Prompt(1, trace_s=1.5 * place) for place in range(3)]
    values = {"dataset_name": "mooncake", "dataset_path": tmp_path, "use_trace_timestamps": True}
    config = BenchServeConfig.parse(values)
    due = due_times(config, prompts, seed=1)
    assert due == [0.0, 1.5, 3.0]
    assert offered_rate(config, due) == 0.6667
    assert in_words(config) == "the trace's time stamps times 1"


def test_arrivals_in_words():
    assert in_words(BenchServeConfig()) == "all at once"
    assert in_words(BenchServeConfig(request_rate=2)) == "Poisson, 2 per second"
    half = BenchServeConfig(rate_profile=("2:2", "2-4:2"), burstiness=0.5)
    assert in_words(half) == "gamma gaps of shape 0.5, 2:2 2-4:2"
    assert offered_rate(half, [0.0, 1.0, 4.0]) == 0.5
