"""Two servers under the same load in turns: do they differ by more than chance?

Runs come in pairs, A B and B A by turns, so that what drifts with time (heat, neighbours) touches
both alike. The ratio B/A of each pair is one observation; their logarithms get Student's interval.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Awaitable, Callable, Sequence

from tetrad.bench.compare.options import BenchCompareConfig
from tetrad.bench.figures.repeats import FIGURES
from tetrad.bench.options.serve import BenchServeConfig
from tetrad.core.errors import TetradError
from tetrad.core.records import BenchRun
from tetrad.core.serve_records import Comparison, Difference

STUDENT_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom; beyond 30 the last is safe."""

Measure = Callable[[BenchServeConfig, int], Awaitable[BenchRun]]


def turns(pairs: int) -> str:
    """The side of each run: abba..."""
    return ("abba" * pairs)[: 2 * pairs]


async def compare(
    config: BenchCompareConfig, measure: Measure
) -> tuple[list[tuple[BenchRun, BenchRun]], BaseException | None]:
    """Pairs of runs (A, B), and what ended them early, if two or more had been measured. Each run
    has prompts of its own, so that no server's cache knows them, even when A and B are one server.
    """
    pairs: list[tuple[BenchRun, BenchRun]] = []
    runs: dict[str, BenchRun] = {}
    for number, side in enumerate(turns(config.pairs)):
        asked = config.model_copy(update={"base_url": getattr(config, side)})
        try:
            runs[side] = await measure(asked, number)
        except (TetradError, asyncio.CancelledError) as error:
            if len(pairs) < 2:
                raise
            return pairs, error
        if runs[side].interrupted:
            return pairs, KeyboardInterrupt()
        if len(runs) == 2:
            pairs.append((runs["a"], runs["b"]))
            runs = {}
    return pairs, None


def comparison(pairs: Sequence[tuple[BenchRun, BenchRun]]) -> Comparison:
    """The difference in every figure that all runs have and that is above 0 in all."""
    differences = []
    for name, read in FIGURES.items():
        values = [(read(a), read(b)) for a, b in pairs]
        known = [(a, b) for a, b in values if a is not None and b is not None and a > 0 and b > 0]
        if len(known) == len(pairs) and len(known) > 1:
            differences.append(difference(name, known))
    return Comparison(num_pairs=len(pairs), differences=differences)


def difference(name: str, pairs: Sequence[tuple[float, float]]) -> Difference:
    """Of one figure, as the ratio B/A."""
    logs = [math.log(b / a) for a, b in pairs]
    mean = statistics.fmean(logs)
    student = STUDENT_95[min(len(logs) - 1, len(STUDENT_95)) - 1]
    half = student * statistics.stdev(logs) / math.sqrt(len(logs))
    return Difference(
        name=name,
        median_a=statistics.median(a for a, _ in pairs),
        median_b=statistics.median(b for _, b in pairs),
        ratio=math.exp(mean),
        low=math.exp(mean - half),
        high=math.exp(mean + half),
    )


def doubts(pairs: Sequence[tuple[BenchRun, BenchRun]]) -> list[str]:
    """Which runs the client was too slow for: no verdict stands on them."""
    runs = enumerate((run for pair in pairs for run in pair), 1)
    late = [(at, run.client.invalid[0]) for at, run in runs if run.client and run.client.invalid]
    if not late:
        return []
    listed = ", ".join(str(number) for number, _ in late)
    return [
        f"  INVALID: in run {listed} of {2 * len(pairs)} the client was too slow ({late[0][1]}):",
        "  believe no verdict above, and compare again on a quieter machine or with a longer load.",
    ]


def table(found: Comparison) -> list[str]:
    """What to print."""
    head = f"{found.num_pairs} pairs of runs, A B and B A by turns:"
    lines = [f"{head:<44} {'A':>10} {'B':>10}   B/A, 95 % interval"]
    for one in found.differences:
        verdict = "differs" if one.is_significant else "no significant difference"
        lines.append(
            f"  {one.name:<42} {one.median_a:>10.2f} {one.median_b:>10.2f}   "
            f"{one.ratio - 1:+.1%} ({one.low - 1:+.1%} to {one.high - 1:+.1%}): {verdict}"
        )
    return [
        *lines,
        "  A and B are medians, B/A is the geometric mean of what each pair gave.",
        "  each figure of equal servers differs by chance one time in twenty, several at once",
        "  where they hang together, as rates and latencies do.",
    ]
