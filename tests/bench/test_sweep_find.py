"""The search against servers whose best point is known."""

from __future__ import annotations

import pytest

from tests.bench.test_block import run as good_run
from tests.bench.test_block import spread
from tetrad.bench.options.serve import BenchServeConfig
from tetrad.bench.sweep import find as sweep_find
from tetrad.bench.sweep import run as sweep
from tetrad.bench.sweep.options import BenchSweepConfig
from tetrad.core.errors import BenchFailure
from tetrad.core.records import BenchRun
from tetrad.core.sweep_records import Place, SweepPoint


def config(**options) -> BenchSweepConfig:
    return BenchSweepConfig.parse({"find": "max-throughput", **options})


def server(each: BenchServeConfig, _: Place) -> BenchRun:
    """TPOT is 10 ms and 0.1 ms more for each request in flight; 1000 is its most throughput."""
    count = each.max_concurrency or 0
    tpot_ms = 10 + 0.1 * count
    latencies = good_run().latencies.model_copy(
        update={"tpot_ms": spread(tpot_ms, tpot_ms, tpot_ms, tpot_ms, tpot_ms)}
    )
    tokens = round(min(1000 * count / (100 + count), 900))
    return good_run(latencies=latencies, duration_s=1.0, output_tokens=tokens)


def searched(options: BenchSweepConfig, measure=server, found=None) -> list[SweepPoint]:
    plan = sweep.plan_of(options)
    return list(sweep_find.search(options, found or {}, plan, measure, lambda line: None))


def counts(points: list[SweepPoint]) -> list[int | None]:
    return [point.place.concurrency for point in points]


def test_it_doubles_until_a_bound_breaks_and_then_closes_the_gap():
    """TPOT reaches 20 ms at 100."""
    options = config(under="tpot:20")
    points = searched(options)
    assert counts(points)[:8] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert all(64 < (count or 0) < 128 for count in counts(points)[8:])
    assert len(points) <= 13
    said = sweep_find.conclusion(points, options.bounds)
    best = max(c for c in counts(points) if c is not None and c <= 100)
    assert best >= 95
    assert f"at concurrency {best}. At concurrency" in said
    assert said.startswith("Most output throughput under P99 TPOT 20 ms: ")


def test_it_ends_where_throughput_stands_still():
    points = searched(config())
    assert counts(points)[-2:] == [1024, 2048]


def test_it_keeps_within_its_limits():
    assert counts(searched(config(concurrency="3,20"))) == [3, 6, 12, 20]
    assert counts(searched(config(num_prompts=5))) == [1, 2, 4, 5]


def test_points_there_are_are_not_measured_again():
    options = config(under="tpot:20")
    points = searched(options)

    def never(each: BenchServeConfig, _: Place) -> BenchRun:
        raise AssertionError

    again = searched(options, never, {point.place: point for point in points})
    assert again == points


def test_bounds_may_be_moved_and_points_stay():
    assert sweep.plan_of(config(under="tpot:20")) == sweep.plan_of(config(under="tpot:30"))
    assert sweep.plan_of(config()) == sweep.plan_of(BenchSweepConfig.parse({"concurrency": "8,16"}))


def test_a_bound_that_nothing_keeps_is_told_with_what_was_measured():
    options = config(under="median_tpot:5")
    points = searched(options)
    assert counts(points) == [1]
    with pytest.raises(BenchFailure, match=r"TPOT 5 ms: at concurrency 1 median TPOT is 10.1"):
        sweep_find.conclusion(points, options.bounds)


def test_a_server_that_has_gone_ends_the_search():
    def dies(each: BenchServeConfig, place: Place) -> BenchRun:
        if each.max_concurrency == 4:
            raise BenchFailure("No server answers.")
        return server(each, place)

    points = searched(config(), dies)
    assert counts(points) == [1, 2, 4]
    with pytest.raises(BenchFailure, match=r"ended at concurrency 4: No server answers"):
        sweep_find.conclusion(points, [])


def test_a_point_whose_requests_fail_is_too_much():
    def refuses(each: BenchServeConfig, place: Place) -> BenchRun:
        run = server(each, place)
        if each.max_concurrency is not None and each.max_concurrency > 10:
            failure = {"kind": "timeout", "count": 1, "example": "slow", "example_request": 0}
            return BenchRun.model_validate({**run.model_dump(), "failed": 1, "failures": [failure]})
        return run

    points = searched(config(), refuses)
    assert counts(points) == [1, 2, 4, 8, 16, 11, 9, 10]
    assert "at concurrency 10. At concurrency 11: 1 of 65" in sweep_find.conclusion(points, [])
    assert points[0].place == Place(concurrency=1)
