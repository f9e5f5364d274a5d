"""Every figure against numbers worked out by hand."""

from __future__ import annotations

import pytest

from tetrad.bench.figures.measure import (
    Answer,
    answer,
    count_failures,
    inter_token_ms,
    latencies,
    peak_in_flight,
    peak_tokens_per_s,
)
from tetrad.bench.load.backends import Reading
from tetrad.bench.load.wire import Trace
from tetrad.bench.workload.requests import Prompt
from tetrad.core.records import Failure, RequestRecord
from tetrad.core.spread import Spread


def made(reading: Reading, *, stream: bool = True, count=None) -> Answer:
    trace = Trace(index=3, due_s=0.5, sent_s=1.0, ended_s=9.0)
    return answer(trace, reading, Prompt(4, num_tokens=7), None, count, stream=stream)


def test_times_of_a_stream_that_says_how_many_tokens_came():
    """Sent at 1.0; tokens at 1.2 (1), 1.5 (3): TTFT 200, E2E 500, TPOT 300 / 3, ITL 3 x 100."""
    reading = Reading(
        stamps=[(1.2, 1), (1.5, 3)], counts_tokens=True, output_tokens=4, prompt_tokens=8
    )
    record = made(reading).record
    assert record.ttft_ms == pytest.approx(200)
    assert (record.ended_s - record.sent_s) * 1e3 == pytest.approx(500)
    assert record.tpot_ms == pytest.approx(100)
    assert record.itls_ms == pytest.approx([100, 100, 100])
    assert record.prompt_tokens == 8
    assert record.output_tokens == 4


def test_a_failure_has_no_gaps_whatever_it_claims():
    """A list with one gap for each of a billion claimed tokens would end the client instead."""
    reading = Reading(stamps=[(1.2, 1), (1.5, 10**9)], counts_tokens=True, output_tokens=10**9)
    failure = Failure(kind="long_output", message="too many")
    got = answer(Trace(index=3), reading, Prompt(4), failure, None, stream=True)
    assert got.record.itls_ms == []


def test_the_end_is_the_last_token_and_not_the_end_of_the_connection():
    assert made(Reading(stamps=[(1.2, 1)], output_tokens=1)).record.ended_s == 1.2


def test_one_token_has_no_time_per_output_token():
    assert made(Reading(stamps=[(1.2, 1)], output_tokens=1)).record.tpot_ms is None


def test_events_that_do_not_say_how_much_they_bring_share_the_usage():
    """Two events, six tokens by usage: three tokens at each stamp, one gap between events."""
    got = made(Reading(stamps=[(1.2, 1), (1.5, 1)], output_tokens=6))
    assert got.stamps == ((1.2, 3.0), (1.5, 3.0))
    assert got.record.itls_ms == pytest.approx([300])
    assert got.record.tpot_ms == pytest.approx(60)


def test_without_usage_the_tokenizer_counts_and_without_one_the_events():
    reading = Reading(text="a b c", stamps=[(1.2, 1), (1.5, 1)])
    counted = made(reading, count=lambda text: len(text.split()))
    assert (counted.record.output_tokens, counted.source) == (3, "tokenizer")
    bare = made(reading)
    assert (bare.record.output_tokens, bare.source) == (2, "events")
    assert bare.record.prompt_tokens == 7


def test_a_whole_answer_has_no_first_token():
    record = made(Reading(stamps=[(2.0, 4)], output_tokens=4), stream=False).record
    assert (record.ttft_ms, record.tpot_ms, record.itls_ms) == (None, None, [])


def test_inter_token_gaps_are_per_token():
    assert inter_token_ms([(0.0, 1), (0.1, 2), (0.4, 1)]) == pytest.approx([50, 50, 300])


def test_peaks():
    assert peak_tokens_per_s([(0.1, 1), (0.9, 1), (1.0, 3), (1.99, 2.5), (2.0, 1)]) == 5.5
    assert peak_tokens_per_s([]) == 0.0
    spans = [(0.0, 2.0), (1.0, 3.0), (1.5, 1.7), (2.0, 4.0)]
    assert peak_in_flight([record(start, end) for start, end in spans]) == 3
    assert peak_in_flight([record(0.0, 1.0), record(1.0, 2.0)]) == 1


def record(sent_s: float, ended_s: float, **values) -> RequestRecord:
    base = {"index": 0, "prompt_tokens": 1, "output_tokens": 1, "due_s": 0.0}
    return RequestRecord(**base | {"sent_s": sent_s, "ended_s": ended_s} | values)


def test_latencies_leave_out_what_a_request_does_not_have():
    some = [
        record(0.0, 1.0, ttft_ms=10, tpot_ms=4, itls_ms=[1, 2]),
        record(0.0, 2.0, ttft_ms=20, itls_ms=[3]),
    ]
    times = latencies(some, stream=True)
    assert times.e2e_ms.mean == pytest.approx(1500)
    assert times.ttft_ms == Spread.of([10, 20])
    assert times.tpot_ms == Spread.of([4])
    assert times.itl_ms == Spread.of([1, 2, 3])
    assert latencies(some, stream=False).ttft_ms is None


def test_spread_is_numpys():
    """numpy: percentile([1, 2, 3, 4, 10], 90) = 7.6, 95: 8.8, 99: 9.76; std(...) = 3.16227766."""
    spread = Spread.of([10, 1, 4, 2, 3])
    assert (spread.count, spread.mean, spread.median) == (5, 4, 3)
    assert (spread.min, spread.max) == (1, 10)
    assert spread.p90 == pytest.approx(7.6)
    assert spread.p95 == pytest.approx(8.8)
    assert spread.p99 == pytest.approx(9.76)
    assert spread.std == pytest.approx(3.16227766)
    assert Spread.of([]).count == 0
    assert Spread.of([5]).p99 == 5


def test_failures_are_counted_by_kind_with_their_first_example():
    outcomes = [
        (0, Failure(kind="empty", message="nothing")),
        (1, None),
        (3, Failure(kind="truncated", message="first")),
        (4, Failure(kind="truncated", message="second")),
    ]
    assert [(c.kind, c.count, c.example, c.example_request) for c in count_failures(outcomes)] == [
        ("truncated", 2, "first", 3),
        ("empty", 1, "nothing", 0),
    ]
