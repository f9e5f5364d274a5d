"""What several API processes count together."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from tests.house.source import ROOT
from tests.server.fake_engine import FakeEngine
from tetrad.core.config import ServeConfig
from tetrad.core.errors import CapacityError
from tetrad.core.request import RequestOutput
from tetrad.server.app import build_app
from tetrad.server.model import ServedModel
from tetrad.server.service import Service
from tetrad.server.shared.tally import FIRST_COUNTER, OPEN, Tally
from tetrad.server.telemetry.metrics import RequestWatch

CHAT = "/v1/chat/completions"


@pytest.fixture
def services(model: ServedModel, engine: FakeEngine) -> list[Service]:
    """Of two API processes, in one."""
    config = ServeConfig(max_queued_requests=1)
    first = Tally.shared(2)
    found = [Service(config, model, tally) for tally in (first, Tally(2, 1, first.file))]
    for service in found:
        build_app(service)
        service.attach(engine)
    return found


def samples(service: Service) -> dict[str, float]:
    lines = service.metrics.exposition().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_any_process_shows_the_sums(services: list[Service]):
    for number, service in enumerate(services):
        for _ in range(3 + number):
            with RequestWatch(service.metrics, CHAT, 1) as watch:
                watch.first_token(0, RequestOutput("r", (5,), prompt_tokens=7, queue_s=0.5))
                watch.last_token(0, 5, "stop")
        service.metrics.refused(CHAT)
        service.metrics.refused("never heard of")
    found = samples(services[0])
    assert found == samples(services[1])
    assert found[f'tetrad_requests_total{{outcome="success",route="{CHAT}"}}'] == 7
    assert found[f'tetrad_requests_total{{outcome="refused",route="{CHAT}"}}'] == 2
    assert "never heard of" not in str(found)
    for name in ("time_to_first_token", "time_per_output_token", "request_duration"):
        assert found[f"tetrad_{name}_seconds_count"] == 7
        assert found[f'tetrad_{name}_seconds_bucket{{le="+Inf"}}'] == 7


def test_a_histogram_counts_below_its_bounds(services: list[Service]):
    histogram = services[1].metrics.first_token
    for value in (0.001, 0.005, 0.006, 1000.0):
        histogram.observe(value)
    found = samples(services[0])
    bucket = 'tetrad_time_to_first_token_seconds_bucket{{le="{}"}}'.format
    bounds = ("0.005", "0.01", "300.0", "+Inf")
    assert [found[bucket(bound)] for bound in bounds] == [2, 3, 3, 4]
    assert found["tetrad_time_to_first_token_seconds_sum"] == pytest.approx(1000.012)


def test_who_dies_leaves_its_counts_and_nothing_open(services: list[Service]):
    first, second = services
    second.metrics.refused(CHAT)
    with second.admit([3, 4]):
        assert (first.open_requests, first.unanswered_requests) == (2, 2)
        assert samples(first)['tetrad_worker_open_requests{worker="1"}'] == 2
        first.tally.bury(1)
        assert (first.open_requests, first.unanswered_requests) == (0, 0)
        assert samples(first)[f'tetrad_requests_total{{outcome="refused",route="{CHAT}"}}'] == 1


def test_the_queue_s_limit_is_of_the_whole_server(services: list[Service], engine: FakeEngine):
    first, second = services
    engine.info["max_running_requests"] = 2
    with first.admit([1]), second.admit([3, 4]):
        for service in services:
            with pytest.raises(CapacityError, match="2 requests would wait"), service.admit([1]):
                pass
    with second.admit([1, 1, 1]):
        assert first.open_requests == 3
    assert first.open_requests == 0


HOLD = """
import sys, time
from tetrad.server.shared.tally import OPEN, Tally
tally = Tally(2, 1, int(sys.argv[1]))
with tally.exclusive():
    tally.put(OPEN, 1.0)
    time.sleep(60)
"""


def holding(tally: Tally) -> subprocess.Popen[bytes]:
    """A process that stays in the block."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tally.file)], cwd=ROOT, pass_fds=(tally.file,)
    )
    deadline = time.monotonic() + 60
    while tally.total(OPEN) == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return holder


def test_a_process_that_hangs_with_the_lock_holds_nobody(monkeypatch: pytest.MonkeyPatch):
    """For two seconds of its sixty, here, and not for ever."""
    monkeypatch.setattr("tetrad.server.shared.tally.PATIENCE_S", 2.0)
    tally = Tally.shared(2)
    holder = holding(tally)
    begun = time.monotonic()
    with tally.exclusive():
        assert time.monotonic() - begun > 1.9, "two were in the block"
        assert holder.poll() is None
    holder.kill()
    holder.wait()
    os.close(tally.file)


def test_a_lock_of_a_process_that_dies_is_free(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tetrad.server.shared.tally.PATIENCE_S", 60.0)
    tally = Tally.shared(2)
    holder = holding(tally)
    killer = subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {holder.pid}"])
    begun = time.monotonic()
    with tally.exclusive():
        assert time.monotonic() - begun > 0.1, "two were in the block"
    holder.wait()
    killer.wait()
    os.close(tally.file)


def test_one_process_needs_no_file():
    tally = Tally()
    tally.add(FIRST_COUNTER, 2.5)
    with tally.exclusive():
        assert tally.each(FIRST_COUNTER) == [2.5]
