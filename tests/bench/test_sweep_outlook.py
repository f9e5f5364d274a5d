"""What a sweep will take: from a warm-up, then from points that were measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.mock_server import MockServer
from tests.bench.test_block import run
from tests.bench.test_outlook import Quiet
from tetrad.bench.sweep import outlook as sweep_outlook
from tetrad.bench.sweep import run as sweep
from tetrad.bench.sweep.options import BenchSweepConfig
from tetrad.bench.sweep.outlook import Pace, first_look, left

FIXED = {"random_output_len": 100, "random_range_ratio": 1.0}


def todo(**options) -> list[sweep.Todo]:
    return sweep.points(BenchSweepConfig.parse(FIXED | options))


def test_throughput_grows_with_the_root_of_the_concurrency():
    """10, 16 and 64 requests of 100 tokens; 10 tok/s at 1, so 20 at 4 and 40 at 16."""
    pace = Pace(prompts=10, output_tokens=1000, in_flight=1, tokens_per_s=10.0)
    one, four, sixteen = (pace.seconds(each.config) for each in todo(concurrency="1,4,16"))
    assert (one, four, sixteen) == pytest.approx((100.0, 80.0, 160.0))
    points = todo(concurrency="1,4,16")
    assert left(pace, None, points) == ", about 6 min left"
    assert left(None, None, points) == ""
    faster = run(duration_s=0.1)
    assert left(pace, faster, points) == left(None, faster, points) == ", about 0 s left"
    assert left(pace, run(output_tokens=0), points) == left(pace, None, points)


def test_arrivals_may_take_longer_than_the_server():
    pace = Pace(prompts=60, output_tokens=6000, in_flight=60, tokens_per_s=1000.0)
    at_rates = todo(request_rates="0.5,inf", num_prompts=60)
    assert [pace.seconds(each.config) for each in at_rates] == pytest.approx([120.0, 6.0])


def test_points_of_a_file_send_what_the_measured_one_sent():
    pace = Pace.of(run(output_tokens=4096, duration_s=2.0))
    assert pace == Pace(prompts=64, output_tokens=4096, in_flight=16, tokens_per_s=2048.0)
    (each,) = todo(dataset_name="custom", dataset_path=Path("x"), concurrency="4")
    assert pace.seconds(each.config) == pytest.approx(4.0)
    assert Pace.of(run(output_tokens=0)) is None


async def test_a_warm_up_like_the_first_point_tells_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sweep_outlook, "WARM_REQUESTS", 3)
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "What is 3+5?", "output_len": 50}\n' * 5)
    load = {"dataset_name": "custom", "dataset_path": lines, "ready_check_timeout_sec": 0.1}
    server = MockServer()
    async with server.running() as url:
        points = todo(base_url=url, concurrency="4,5", **load)
        pace = await first_look(points, Quiet())
        assert pace is not None
        assert (pace.prompts, pace.output_tokens, pace.in_flight) == (5, 250, 3)
        assert pace.tokens_per_s > 0
        assert len(server.bodies) == 3
        assert await first_look(points[:1], Quiet()) is None, "one point needs no outlook"
        assert await first_look([], Quiet()) is None
        cold = todo(base_url=url, concurrency="4,5", warmup_requests=0, **load)
        assert await first_look(cold, Quiet()) is None
    assert len(server.bodies) == 3
    assert await first_look(points, Quiet()) is None, "the points will tell that nobody answers"
