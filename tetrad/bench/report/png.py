"""The report's plots as PNG files, drawn by matplotlib."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tetrad.bench.report.charts import Chart
from tetrad.bench.report.plots import of_run, overview
from tetrad.bench.report.pyplot import require_matplotlib
from tetrad.core.sweep_records import SweepPoint

INCHES = (7.0, 3.4)
DOTS_PER_INCH = 144
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9")
"""Those of the page, in its order."""
MOST_NAMES = 12


def named_charts(points: Sequence[SweepPoint]) -> Iterator[tuple[str, Chart]]:
    """Every plot of the report and the name of its file, without ending."""
    for chart in overview(points):
        yield _file_name(chart.title), chart
    for point in points:
        if point.run is not None:
            place = str(point.place) or "run 1"
            for chart in of_run(point.run):
                yield (
                    _file_name(f"{place} {chart.title}" if len(points) > 1 else chart.title),
                    chart,
                )


def _file_name(words: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", words.lower()).strip("-")


def write(points: Sequence[SweepPoint], folder: Path) -> list[Path]:
    """Write all of them into a folder that is there; existing files of a name are replaced."""
    plt = require_matplotlib("--png")
    written = []
    for name, chart in named_charts(points):
        figure, axes = plt.subplots(figsize=INCHES, layout="constrained")
        _draw(axes, chart)
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1], dpi=DOTS_PER_INCH)
        plt.close(figure)
    return written


def _draw(axes: Any, chart: Chart) -> None:
    for curve in chart.curves:
        axes.plot(
            [at for at, _ in curve.points],
            # matplotlib breaks a line at NaN.
            [float("nan") if value is None else value for _, value in curve.points],
            color=COLOURS[curve.colour % len(COLOURS)],
            linestyle="--" if curve.is_dashed else "-",
            marker="o" if chart.has_dots or len(curve.points) == 1 else None,
            label=curve.name,
            clip_on=False,
        )
    if chart.counts:
        lows, highs = zip(*chart.bins, strict=True)
        widths = [high - low for low, high in chart.bins]
        axes.bar(lows, chart.counts, widths, align="edge", color=COLOURS[0], linewidth=0)
        axes.set_xlim(lows[0], highs[-1])
    ticks = chart.x.ticks[:: max(1, -(-len(chart.x.ticks) // MOST_NAMES))]
    axes.set_xticks([at for at, _ in ticks], [name for _, name in ticks])
    axes.set_yticks([at for at, _ in chart.y.ticks], [name for _, name in chart.y.ticks])
    axes.set(xlim=(chart.x.low, chart.x.high), ylim=(0, chart.y.high))
    axes.set(xlabel=chart.x.label, ylabel="" if chart.y_label == chart.title else chart.y_label)
    axes.set_title(chart.title, loc="left", fontsize="medium")
    axes.grid(axis="y", color="#d8dde3")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if len(chart.curves) > 1:
        axes.legend(fontsize="small")
