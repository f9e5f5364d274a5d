"""The timeline and the histogram against numbers worked out by hand."""

from __future__ import annotations

import pytest

from tetrad.bench.figures.series import MOST_STEPS, histogram, step_of, timeline
from tetrad.core.records import RequestRecord
from tetrad.core.spread import Spread


def request(sent_s: float, ended_s: float) -> RequestRecord:
    return RequestRecord(
        index=0, prompt_tokens=1, output_tokens=1, due_s=0.0, sent_s=sent_s, ended_s=ended_s
    )


def test_the_step_is_round_and_there_are_few():
    assert step_of(1.0) == step_of(0.001) == pytest.approx(0.05)
    assert step_of(10.1) == pytest.approx(0.1)
    assert step_of(400.0) == pytest.approx(2.0)
    for duration_s in (0.001, 0.37, 7.0, 199.9, 12345.0):
        assert duration_s / step_of(duration_s) <= MOST_STEPS


def test_requests_and_tokens_fall_into_their_steps():
    """10 s in steps of 50 ms: one request over all of it, one over the first step and a half."""
    found = timeline([request(0.0, 10.0), request(0.0, 0.075)], [(0.02, 3.0), (9.999, 1.0)], 10.0)
    assert found is not None
    assert found.step_s == pytest.approx(0.05)
    assert len(found.in_flight) == len(found.tokens_per_s) == 200
    assert found.in_flight[:3] == pytest.approx([2.0, 1.5, 1.0])
    assert found.in_flight[-1] == pytest.approx(1.0)
    assert found.tokens_per_s[0] == pytest.approx(3 / 0.05)
    assert found.tokens_per_s[-1] == pytest.approx(1 / 0.05)


def test_the_last_step_is_as_long_as_the_run_lasts():
    """0.12 s in steps of 50 ms; the last one is shorter."""
    found = timeline([request(0.0, 0.12)], [(0.12, 4.0)], 0.12)
    assert found is not None
    assert found.in_flight == pytest.approx([1.0] * 3)
    assert found.tokens_per_s[-1] == pytest.approx(4 / 0.02)


def test_in_flight_over_time_adds_up_to_the_latencies():
    spans = [(0.013 * n, 0.013 * n + 0.3 + 0.07 * (n % 5)) for n in range(100)]
    end_s = max(end for _, end in spans)
    found = timeline([request(*span) for span in spans], (), end_s)
    assert found is not None
    assert found.tokens_per_s == []
    widths = [min(found.step_s, end_s - n * found.step_s) for n in range(len(found.in_flight))]
    total = sum(n * width for n, width in zip(found.in_flight, widths, strict=True))
    assert total == pytest.approx(sum(end - begin for begin, end in spans))


def test_gaps_are_counted_up_to_p99_and_the_rest_is_told():
    values = [float(n) for n in range(1000)]
    found = histogram(values, Spread.of(values))
    assert found is not None
    assert found.low == 0.0
    assert found.high == pytest.approx(989.01)
    assert sum(found.counts) + found.above == 1000
    assert found.above == 10
    assert set(found.counts) <= {19, 20}


def test_equal_gaps_are_one_bin_and_none_is_none():
    values = [7.0] * 5
    found = histogram(values, Spread.of(values))
    assert found is not None
    assert (found.counts, found.above) == ([5], 0)
    assert histogram([], Spread()) is None
    assert timeline([], (), 0.0) is None
