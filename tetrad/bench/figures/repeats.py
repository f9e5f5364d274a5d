"""A run several times over: how far its figures can be trusted to come again."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence

from tetrad.core.records import BenchRun
from tetrad.core.serve_records import Figure, Repeats
from tetrad.core.spread import Spread, percentile

DRAWS = 10_000
FEW = 5
"""Below this number of runs an interval of their median is little more than their range."""


def _of(spread: Spread | None, statistic: str) -> float | None:
    if spread is None or not spread.count:
        return None
    return float(getattr(spread, statistic))


FIGURES: dict[str, Callable[[BenchRun], float | None]] = {
    "Output token throughput (tok/s)": lambda run: run.output_throughput,
    "Request throughput (req/s)": lambda run: run.request_throughput,
    "Steady output throughput (tok/s)": lambda run: (
        None if run.steady is None else run.steady.output_throughput
    ),
    "Mean TTFT (ms)": lambda run: _of(run.latencies.ttft_ms, "mean"),
    "P99 TTFT (ms)": lambda run: _of(run.latencies.ttft_ms, "p99"),
    "Mean TPOT (ms)": lambda run: _of(run.latencies.tpot_ms, "mean"),
    "P99 TPOT (ms)": lambda run: _of(run.latencies.tpot_ms, "p99"),
    "P99 ITL (ms)": lambda run: _of(run.latencies.itl_ms, "p99"),
    "Mean E2E Latency (ms)": lambda run: _of(run.latencies.e2e_ms, "mean"),
    "P99 E2E Latency (ms)": lambda run: _of(run.latencies.e2e_ms, "p99"),
    "Energy for each output token (J)": lambda run: (
        None if run.telemetry is None else run.telemetry.energy_per_token_j
    ),
}


def repeats(runs: Sequence[BenchRun]) -> Repeats:
    """Median, spread and interval of every figure that all runs have."""
    figures = []
    for name, read in FIGURES.items():
        values = [value for run in runs if (value := read(run)) is not None]
        if len(values) == len(runs):
            figures.append(figure(name, values))
    return Repeats(num_runs=len(runs), figures=figures)


def figure(name: str, values: Sequence[float]) -> Figure:
    """Of one figure; values in the order of the runs."""
    median = statistics.median(values)
    low, high = interval(values)
    return Figure(
        name=name,
        values=list(values),
        median=median,
        low=low,
        high=high,
        spread=(max(values) - min(values)) / median if median else 0.0,
    )


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Bootstrap's 95 % interval of the median; the same draws for the same number of values."""
    rng = random.Random(len(values))
    drawn = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(DRAWS))
    return percentile(drawn, 2.5), percentile(drawn, 97.5)


def table(found: Repeats) -> list[str]:
    """What to print below the last block."""
    head = f"{found.num_runs} runs with fresh prompts:"
    rows = [f"{head:<34} {'median':>10}   95 % interval of the median   spread"]
    rows += [
        f"  {f.name:<32} {f.median:>10.2f}   {f.low:>10.2f} to {f.high:<10.2f}   {f.spread:>9.1%}"
        for f in found.figures
    ]
    if found.num_runs < FEW:
        rows.append(f"  fewer than {FEW} runs: the intervals are little more than their range.")
    return rows
