"""One page about a run or a sweep: figures, plots, failures, and how it was made.

The page loads nothing and runs nothing, and its policy forbids both; what comes from a server is
escaped by the template and by the writer of the plots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from tetrad import __version__
from tetrad.bench.block import block, remarks
from tetrad.bench.report_svg import Axis, Curve, bars, curves
from tetrad.core.records import BenchRun
from tetrad.core.spread import Spread
from tetrad.core.sweep_records import Place, SweepPoint

TEMPLATE = Path(__file__).with_name("report.html.jinja")
HEADINGS = (
    *("point", "result", "completed", "failed", "requests/s", "output tok/s", "total tok/s"),
    *("in flight", "TTFT ms", "P99", "TPOT ms", "P99", "ITL ms", "P99", "E2E ms", "P99"),
)
Value = Callable[[BenchRun], float | None]


@dataclass(frozen=True, slots=True)
class Part:
    """What the page tells of one point."""

    point: SweepPoint
    block: str
    remarks: list[str]
    plots: list[Markup] = field(default_factory=list)


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
        points=points,
        rows=[cells(point) for point in points],
        overview=list(overview(points)),
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


def overview(points: Sequence[SweepPoint]) -> Iterator[Markup]:
    """Throughput and latencies over what the sweep varies; nothing for a single point."""
    if len(points) < 2:
        return
    label, at = varied([point.place for point in points])
    names = list(dict.fromkeys(at(point.place)[0] for point in points))
    groups = list(dict.fromkeys(at(point.place)[1] for point in points))
    good = {p.place: p.run for p in points if p.run is not None and p.run.completed}
    broken = {at(p.place)[0] for p in points if p.place not in good}
    axis = Axis.named(label, [f"{name} (failed)" if name in broken else name for name in names])

    def plot(title: str, unit: str, shown: dict[str, Value]) -> Markup:
        drawn = []
        for (colour, group), name in product(enumerate(groups), shown):
            places = [p.place for p in points if at(p.place)[1] == group]
            read = {p: shown[name](good[p]) if p in good else None for p in places}
            found = sorted((names.index(at(p)[0]), value) for p, value in read.items())
            full_name = " ".join(word for word in (group, name) if word)
            drawn.append(Curve(full_name, found, colour, is_dashed=name == "P99"))
        return curves(f"{title} against {label}", axis, f"{title}, {unit}", drawn, dots=True)

    yield plot("output throughput", "tok/s", {"": lambda run: run.output_throughput})
    for title, name in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("E2E latency", "e2e_ms")):
        if any(getattr(run.latencies, name) for run in good.values()):
            yield plot(title, "ms", {"median": _of(name, "median"), "P99": _of(name, "p99")})


def _of(latency: str, statistic: str) -> Value:
    def read(run: BenchRun) -> float | None:
        spread = getattr(run.latencies, latency)
        return getattr(spread, statistic) if spread is not None and spread.count else None

    return read


def varied(places: Sequence[Place]) -> tuple[str, Callable[[Place], tuple[str, str]]]:
    """The label of the axis, and for a place where it lies on it and which curve it belongs to."""
    settings: dict[str, Callable[[Place], str]] = {
        "concurrency": lambda place: str(place.concurrency),
        "requests/s": lambda place: str(place.request_rate),
        "prompt/output tokens": lambda place: f"{place.input_len}/{place.output_len}",
        "run": lambda place: str(place.repetition),
    }
    moving = [name for name, read in settings.items() if len(set(map(read, places))) > 1]
    label, *others = moving or ["concurrency"]
    words = {"requests/s": "{} req/s", "run": "run {}"}

    def at(place: Place) -> tuple[str, str]:
        group = [words.get(other, "{}").format(settings[other](place)) for other in others]
        return settings[label](place), ", ".join(group)

    return label, at


def _part(point: SweepPoint) -> Part:
    run = point.run
    if run is None:
        return Part(point, "", [])
    return Part(point, block(run), remarks(run), list(_plots(run)))


def _plots(run: BenchRun) -> Iterator[Markup]:
    if (line := run.timeline) is not None:
        middles = [(n + 0.5) * line.step_s for n in range(len(line.in_flight))]
        time = Axis.of("seconds since the start", 0.0, run.duration_s)
        for title, values in (
            ("requests in flight", line.in_flight),
            ("output tokens per second", line.tokens_per_s),
        ):
            if values:
                curve = Curve(title, list(zip(middles, values, strict=True)))
                yield curves(title, time, title, [curve], dots=len(values) == 1)
    if (gaps := run.itl_histogram) is not None:
        label = f"inter-token latency in ms, up to P99; {gaps.above:,} lie above"
        yield bars(
            "inter-token latency", Axis.of(label, gaps.low, gaps.high), "tokens", gaps.counts
        )
