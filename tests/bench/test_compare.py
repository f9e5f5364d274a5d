"""Two servers differ when the interval says so, and not before."""

from __future__ import annotations

import asyncio
import math

import pytest

from tests.bench.test_block import run
from tests.bench.test_selfcheck import checked
from tetrad.bench.compare.options import BenchCompareConfig
from tetrad.bench.compare.run import compare, comparison, difference, doubts, table
from tetrad.core.errors import BenchFailure, ConfigError


def test_the_interval_is_students():
    """Ratios e^0.1, e^0.2, e^0.3: mean 0.2, deviation 0.1, t(2) = 4.303."""
    found = difference("x", [(1.0, math.exp(r)) for r in (0.1, 0.2, 0.3)])
    half = 4.303 * 0.1 / math.sqrt(3)
    assert math.log(found.ratio) == pytest.approx(0.2)
    assert math.log(found.low) == pytest.approx(0.2 - half)
    assert math.log(found.high) == pytest.approx(0.2 + half)
    assert not found.is_significant
    assert difference("x", [(1.0, math.exp(r)) for r in (0.19, 0.2, 0.21)]).is_significant


def test_what_drifts_alike_is_no_difference():
    """Both get slower together; B is 2 % faster throughout."""
    pairs = [(run(duration_s=s), run(duration_s=s / 1.02)) for s in (1.0, 1.4, 2.0)]
    rows = table(comparison(pairs))
    assert rows[1].split()[:4] == ["Output", "token", "throughput", "(tok/s)"]
    assert "+2.0% (+2.0% to +2.0%): differs" in rows[1]
    noisy = [(run(duration_s=1.0), run(duration_s=s)) for s in (0.9, 1.0, 1.12)]
    assert table(comparison(noisy))[1].endswith("no significant difference")


def test_runs_that_are_invalid_are_named_below_the_table():
    late = checked().model_copy(update={"invalid": ["its event loop ran late."]})
    right, wrong = run(), run().model_copy(update={"client": late})
    assert doubts([(right, right)] * 3) == []
    told = "\n".join(doubts([(right, wrong), (right, right), (wrong, right)]))
    assert "in run 2, 5 of 6 the client was too slow (its event loop ran late.)" in told
    assert "believe no verdict above" in told


async def test_turns_change_and_no_prompt_comes_twice():
    asked = []

    async def measure(config, repetition):
        asked.append((config.url, repetition))
        return run()

    config = BenchCompareConfig(a="http://a:1", b="http://b:1", pairs=3)
    pairs, ended_by = await compare(config, measure)
    assert len(pairs) == 3
    assert ended_by is None
    assert "".join(url[7] for url, _ in asked) == "abbaab"
    assert [repetition for _, repetition in asked] == list(range(6))


@pytest.mark.parametrize("error", [BenchFailure("gone"), asyncio.CancelledError()])
@pytest.mark.parametrize("fails_at", [3, 5])
async def test_what_was_measured_outlives_the_run_that_fails(error: BaseException, fails_at: int):
    """With two pairs there is an interval to show."""
    config = BenchCompareConfig(a="http://a:1", b="http://b:1", pairs=4)

    async def measure(_asked, repetition):
        if repetition == fails_at:
            raise error
        return run()

    if fails_at == 3:
        with pytest.raises(type(error)):
            await compare(config, measure)
    else:
        pairs, ended_by = await compare(config, measure)
        assert (len(pairs), ended_by) == (2, error)


def test_two_addresses_are_needed():
    with pytest.raises(ConfigError, match="Two addresses are compared"):
        BenchCompareConfig.parse({"a": "http://a:1"})
    for other in ({"repeat": 2}, {"port": 5}, {"host": "h"}, {"base_url": "http://c:1"}):
        with pytest.raises(ConfigError, match="take the place of"):
            BenchCompareConfig.parse({"a": "http://a:1", "b": "http://b:1", **other})
