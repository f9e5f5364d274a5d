"""Statistics of the timer, with a clock that the test turns."""

from __future__ import annotations

import pytest
import torch

from tetrad.core.records import CallTime
from tetrad.kernels.timer import (
    ESTIMATE_REPEATS,
    FLUSH_BYTES,
    FLUSH_US,
    MAX_REPEATS,
    MIN_REPEATS,
    SLOW_US,
    CudaTimer,
    WallTimer,
    num_repeats,
    timer_for,
)


class Clock:
    """Stands still until a call moves it."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def call_taking(self, *durations_us: float):
        """A call that takes these times in turn, the last one from then on."""
        left = list(durations_us)

        def call() -> None:
            self.now_s += (left.pop(0) if len(left) > 1 else left[0]) / 1e6

        return call


def test_a_summary_of_samples():
    found = CallTime.of([5.0, 1.0, 2.0, 4.0, 3.0], "wall", "why")
    assert (found.median_us, found.min_us, found.repeats) == (3.0, 1.0, 5)
    assert (found.p10_us, found.p90_us) == pytest.approx((1.4, 4.6))
    assert (found.method, found.note) == ("wall", "why")


def test_the_first_run_does_not_count():
    clock = Clock()
    found = WallTimer(clock).time([clock.call_taking(900.0, 10.0)], budget_s=1.0)
    assert found.median_us == pytest.approx(10.0)
    assert found.p90_us == pytest.approx(10.0)
    assert found.repeats == MAX_REPEATS


def test_calls_take_turns():
    clock = Clock()
    calls = [clock.call_taking(10.0), clock.call_taking(30.0)]
    found = WallTimer(clock).time(calls, budget_s=1.0)
    assert (found.min_us, found.median_us) == pytest.approx((10.0, 20.0))


def test_a_budget_ends_the_measurement_but_not_before_three_repeats():
    clock = Clock()
    assert WallTimer(clock).time([clock.call_taking(1e5)], budget_s=1.05).repeats == 10
    assert WallTimer(clock).time([clock.call_taking(9e5)], budget_s=0.5).repeats == MIN_REPEATS


def test_a_call_that_takes_the_whole_budget_counts_once():
    """Other inputs of it are left alone."""
    clock, others = Clock(), []
    calls = [clock.call_taking(5e6), lambda: others.append(1)]
    assert WallTimer(clock).time(calls, budget_s=1.0).repeats == 1
    assert others == []


def test_repeats_on_a_gpu_fit_the_budget():
    assert num_repeats(10.0, budget_s=1.0) == MAX_REPEATS
    assert num_repeats(10.0, budget_s=20 * (10.0 + FLUSH_US) / 1e6) == 20
    assert num_repeats(10.0, budget_s=0.0) == MIN_REPEATS
    assert num_repeats(2 * SLOW_US, budget_s=100.0) == MIN_REPEATS


def test_a_cpu_has_a_wall_clock():
    assert isinstance(timer_for(torch.device("cpu")), WallTimer)


@pytest.mark.gpu
def test_a_gpu_replays_graphs_and_falls_back_for_calls_that_wait():
    timer = timer_for(torch.device("cuda"))
    assert isinstance(timer, CudaTimer)
    numbers = torch.ones(1 << 20, device="cuda")
    graph = timer.time([lambda: numbers.mul_(1.0)], budget_s=0.05)
    assert (graph.method, graph.note) == ("graph", "")
    assert 0 < graph.min_us <= graph.median_us
    assert graph.launches == 1
    waiting = timer.time([lambda: numbers.sum().item()], budget_s=0.05)
    assert waiting.method == "events"
    assert "waits for the device" in waiting.note
    assert timer.time([lambda: numbers.mul_(1.0)], budget_s=0.05).method == "graph"


@pytest.mark.gpu
def test_every_replay_follows_a_flush_that_reads_all_of_its_buffer():
    timer = CudaTimer(torch.device("cuda"))
    number, flushes, flush = torch.zeros((), device="cuda"), [], timer.flush

    def counted() -> None:
        flush()
        flushes.append(timer._total.item())

    timer.flush = counted  # type: ignore[method-assign]
    found = timer.time([lambda: number.add_(1.0)], budget_s=0.0)
    assert flushes == [FLUSH_BYTES / 4] * (ESTIMATE_REPEATS + found.repeats)
