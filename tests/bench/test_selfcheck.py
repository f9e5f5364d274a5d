"""A client that is late says so; what it says is worked out by hand here."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from tetrad.bench.figures.measure import answer
from tetrad.bench.figures.selfcheck import check, lines
from tetrad.bench.load.backends import Reading
from tetrad.bench.load.lag import Watched, read_lag_s
from tetrad.bench.load.processes import Outcome
from tetrad.bench.load.wire import Trace
from tetrad.bench.workload.requests import Prompt
from tetrad.core.client_records import ClientCheck


def test_a_round_that_nothing_woke_had_its_bytes_since_the_last_one():
    """Rounds 1.0-1.2 and 1.20001-1.3: the second began at once, so its bytes lay since 1.0."""
    seen = Watched(begun=array("d", [1.0, 1.20001, 2.0]), ended=array("d", [1.2, 1.3, 2.1]))
    lags = read_lag_s(seen, [1.0, 1.1, 1.25, 2.05])
    assert lags == pytest.approx([0.0, 0.1, 0.25, 0.05])
    assert read_lag_s(Watched(), [1.0]).tolist() == [0.0]
    assert read_lag_s(seen, []).tolist() == []


def checked(
    first_lag_s=0.0,
    last_lag_s=0.0,
    sent_late_s=0.0,
    *,
    loop_late_s=0.0,
    due_s=0.5,
    has_cap=False,
    unread=(0,),
    busy=(0.11,),
) -> ClientCheck:
    """One request: TTFT 200 ms, 11 tokens, TPOT 20 ms."""
    trace = Trace(0, due_s=due_s, ready_s=due_s, sent_s=due_s + sent_late_s, is_finished=True)
    stamps = [(trace.sent_s + 0.2 + 0.02 * i, 1) for i in range(11)]
    reading = Reading(stamps=stamps, counts_tokens=True, output_tokens=11)
    outcome = Outcome(
        traces=[trace],
        readings={0: reading},
        duration_s=1.0,
        interrupted=False,
        watched=[
            Watched(
                late_s=array("d", [loop_late_s]),
                unread=array("q", unread),
                busy=array("d", busy),
                cpu_s=0.11,
                waited_s=0.2,
            )
        ],
        read_lag_s=np.array([first_lag_s, last_lag_s]),
        event_lags_s={0: (first_lag_s, last_lag_s)},
    )
    one = answer(trace, reading, Prompt(11), None, None, stream=True)
    return check(outcome, [one], has_cap=has_cap, stream=True)


def test_a_client_in_time_is_valid_and_tells_its_cost():
    found = checked(0.001, 0.001)
    assert found.invalid == []
    assert found.us_per_token == pytest.approx(0.11 / 11 * 1e6)
    assert (found.cpu_shares, found.waited_share) == ([0.11], 0.2)
    assert found.ttft_bias_ms == pytest.approx(1.0)
    assert found.itl_median_over_mean == pytest.approx(1.0)
    assert not any(line.startswith("INVALID") for line in lines(found))


@pytest.mark.parametrize(
    ("late", "reason"),
    [
        ({"first_lag_s": 0.0021, "last_lag_s": 0.0021}, "it read first tokens 2.10 ms late"),
        ({"loop_late_s": 0.0021}, "its event loop ran 2.10 ms late, as did its reads, 1.1% of"),
        ({"last_lag_s": 0.0021}, "it read tokens 0.21 ms late, 1.1% of the mean TPOT"),
        (
            {"sent_late_s": 0.0021},
            "it sent requests 2.10 ms late, another load than asked for",
        ),
        ({"unread": (1, 1, 0)}, "bytes lay unread in 67% of its connections"),
    ],
)
def test_more_than_one_percent_is_invalid(late, reason: str):
    found = checked(**late)
    assert len(found.invalid) == 1
    assert found.invalid[0].startswith(reason)
    assert lines(found)[-1].startswith(f"INVALID: the client was too slow: {reason}")


def test_what_it_adds_at_most_is_what_it_is_judged_by():
    """A loop that ran late read late, which its reads cannot tell; one that could not keep up knows
    no bound."""
    late = lines(checked(0.00008, 0.00008, loop_late_s=0.0021))
    assert "client: adds at most 2.10 ms to the mean TTFT and 0.0000 ms to the mean TPOT" in late
    assert "client: adds at most 0.08 ms to" in " ".join(lines(checked(0.00008, 0.00008)))
    assert "adds at most" not in " ".join(lines(checked(unread=(1, 1, 0))))


@pytest.mark.parametrize(
    ("busy", "cure"),
    [
        ((0.3, 0.95), "it used 95% of a core; give it more processes (--workers)"),
        ((0.3,), "it used 30% of a core and waited for one 20% of the time, as others had them"),
    ],
)
def test_the_cure_is_for_what_it_lacked(busy: tuple[float, ...], cure: str):
    (told,) = checked(sent_late_s=0.1, busy=busy).invalid
    assert cure in told
    assert ("--workers" in told) == (max(busy) > 0.9)


def test_just_below_one_percent_is_valid():
    assert checked(0.0019, 0.0019, 0.0019).invalid == []
    assert checked(0.0, 0.0019).invalid == []


def test_requests_that_are_all_due_at_once_cannot_be_sent_at_once():
    assert checked(sent_late_s=0.1, due_s=0.0).invalid == []
    assert checked(sent_late_s=0.1, has_cap=True).invalid == []
