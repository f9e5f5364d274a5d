"""One page about a run or a sweep: figures, plots, failures, and how it was made.

The page loads nothing and runs nothing, and its policy forbids both; what comes from a server is
escaped by the template and by the writer of the plots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from tetrad import __version__
from tetrad.bench.report.block import block, remarks
from tetrad.bench.report.plots import of_run, overview
from tetrad.bench.report.svg import drawn
from tetrad.bench.report.telemetry import GPU_HEADINGS, gpu_row
from tetrad.core.spread import Spread
from tetrad.core.sweep_records import SweepPoint

TEMPLATE = Path(__file__).with_name("page.html.jinja")
HEADINGS = (
    *("point", "result", "completed", "failed", "requests/s", "output tok/s", "total tok/s"),
    *("in flight", "TTFT ms", "P99", "TPOT ms", "P99", "ITL ms", "P99", "E2E ms", "P99"),
)


@dataclass(frozen=True, slots=True)
class Part:
    """What the page tells of one point."""

    point: SweepPoint
    block: str
    remarks: list[str]
    plots: list[Markup] = field(default_factory=list)
    gpu_rows: list[list[str]] = field(default_factory=list)


def page(points: Sequence[SweepPoint], command: str, machine: dict[str, Any]) -> str:
    """The report as HTML. `command` and `machine` are those of whoever writes it."""
    runs = [point.run for point in points if point.run is not None]
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return template.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        version=__version__,
        command=command,
        machine=list(flat(machine)),
        first=runs[0] if runs else None,
        url=runs[0].url if runs else "",
        started_at=points[0].started_at,
        headings=HEADINGS,
        gpu_headings=GPU_HEADINGS,
        points=points,
        rows=[cells(point) for point in points],
        overview=[drawn(chart) for chart in overview(points)],
        parts=[_part(point) for point in points],
    )


def flat(values: dict[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Facts about a machine as rows; empty ones are left out."""
    for name, value in values.items():
        title = f"{above}{name.replace('_', ' ')}"
        if isinstance(value, dict):
            yield from flat(value, f"{title}: ")
        elif isinstance(value, list):
            for number, each in enumerate(value):
                yield from flat(
                    each if isinstance(each, dict) else {"": each}, f"{title} {number} "
                )
        elif value not in ("", None):
            shown = f"{value / 2**30:.1f} GiB" if name.endswith("_bytes") else str(value)
            yield title.removesuffix(" bytes"), shown


def cells(point: SweepPoint) -> list[str]:
    """A row of the table of points, in the order of HEADINGS."""
    name, run = str(point.place) or "run 1", point.run
    if run is None:
        return [name, point.status, *[""] * (len(HEADINGS) - 2)]
    times = run.latencies
    spreads = (times.ttft_ms, times.tpot_ms, times.itl_ms, times.e2e_ms)
    return [
        name,
        point.status,
        str(run.completed),
        str(run.failed),
        f"{run.request_throughput:.2f}",
        f"{run.output_throughput:,.1f}",
        f"{run.input_throughput + run.output_throughput:,.1f}",
        f"{run.concurrency:.1f}",
        *[text for spread in spreads for text in _median_and_p99(spread)],
    ]


def _median_and_p99(spread: Spread | None) -> tuple[str, str]:
    if spread is None or not spread.count:
        return "", ""
    return f"{spread.median:,.1f}", f"{spread.p99:,.1f}"


def _part(point: SweepPoint) -> Part:
    run = point.run
    if run is None:
        return Part(point, "", [])
    plots = [drawn(chart) for chart in of_run(run)]
    gpus = run.telemetry.gpus if run.telemetry is not None else []
    return Part(point, block(run), remarks(run), plots, [gpu_row(gpu) for gpu in gpus])
