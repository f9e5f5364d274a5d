"""Which plots a report has: of a sweep what it varies, of a run its course."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

from tetrad.bench.report.charts import Axis, Chart, Curve
from tetrad.bench.report.telemetry import telemetry_charts
from tetrad.core.records import BenchRun
from tetrad.core.sweep_records import Place, SweepPoint

Value = Callable[[BenchRun], float | None]


def overview(points: Sequence[SweepPoint]) -> Iterator[Chart]:
    """Throughput and latencies over what the sweep varies; nothing for a single point."""
    if len(points) < 2:
        return
    label, at = varied([point.place for point in points])
    names = list(dict.fromkeys(at(point.place)[0] for point in points))
    groups = list(dict.fromkeys(at(point.place)[1] for point in points))
    good = {p.place: p.run for p in points if p.run is not None and p.run.completed}
    broken = {at(p.place)[0] for p in points if p.place not in good}
    axis = Axis.named(label, [f"{name} (failed)" if name in broken else name for name in names])

    def plot(title: str, unit: str, shown: dict[str, Value]) -> Chart:
        drawn = []
        for (colour, group), name in product(enumerate(groups), shown):
            places = [p.place for p in points if at(p.place)[1] == group]
            read = {p: shown[name](good[p]) if p in good else None for p in places}
            found = sorted((names.index(at(p)[0]), value) for p, value in read.items())
            full_name = " ".join(word for word in (group, name) if word)
            drawn.append(Curve(full_name, found, colour, is_dashed=name == "P99"))
        return Chart(f"{title} against {label}", axis, f"{title}, {unit}", drawn, has_dots=True)

    yield plot("output throughput", "tok/s", {"": lambda run: run.output_throughput})
    for title, name in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("E2E latency", "e2e_ms")):
        if any(getattr(run.latencies, name) for run in good.values()):
            yield plot(title, "ms", {"median": _of(name, "median"), "P99": _of(name, "p99")})
    if any(energy_per_token_j(run) is not None for run in good.values()):
        yield plot("energy for each output token", "J", {"": energy_per_token_j})


def energy_per_token_j(run: BenchRun) -> float | None:
    """None where no GPU was sampled."""
    return None if run.telemetry is None else run.telemetry.energy_per_token_j


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


def of_run(run: BenchRun) -> Iterator[Chart]:
    """A run's course in time, and how its gaps spread."""
    time = Axis.of("seconds since the start", 0.0, run.duration_s)
    if (line := run.timeline) is not None:
        middles = [(n + 0.5) * line.step_s for n in range(len(line.in_flight))]
        for title, values in (
            ("requests in flight", line.in_flight),
            ("output tokens per second", line.tokens_per_s),
        ):
            if values:
                curve = Curve(title, list(zip(middles, values, strict=True)))
                yield Chart(title, time, title, [curve])
    if run.telemetry is not None:
        yield from telemetry_charts(run.telemetry, time)
    if (gaps := run.itl_histogram) is not None:
        label = f"inter-token latency in ms, up to P99; {gaps.above:,} lie above"
        axis = Axis.of(label, gaps.low, gaps.high)
        yield Chart("inter-token latency", axis, "tokens", counts=gaps.counts)
