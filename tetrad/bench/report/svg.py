"""Plots as inline SVG: a few curves over one axis, or bars. Every text is escaped by the writer.

Colours and fonts are the page's: curves have the classes c0, c1, ..., text has its own size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from xml.etree import ElementTree as ET

from markupsafe import Markup

from tetrad.bench.report.charts import Axis, Chart, Curve

WIDTH, PLOT_HEIGHT = 560, 180
LEFT, RIGHT, TOP, BOTTOM = 66, 14, 26, 44
MOST_NAMES = 12
NUM_COLOURS = 6
LEGEND_ROW = 16
LETTER = 6.6
"""Width of a letter of the legend, about."""


def drawn(chart: Chart) -> Markup:
    """A chart as it goes into the page; with dots each point can be pointed at for its value."""
    plot = Plot(chart.title, chart.x, chart.y, chart.curves if len(chart.curves) > 1 else ())
    for curve in chart.curves:
        for is_there, piece in groupby(curve.points, lambda point: point[1] is not None):
            if is_there:
                _draw(plot, curve, [(at, value or 0.0) for at, value in piece], chart.has_dots)
    for (low, high), count in zip(chart.bins, chart.counts, strict=True):
        _bar(plot, low, high, count)
    return plot.written()


def _style(curve: Curve) -> str:
    return f"c{curve.colour % NUM_COLOURS}{' dashed' if curve.is_dashed else ''}"


def _draw(plot: Plot, curve: Curve, piece: Sequence[tuple[float, float]], has_dots: bool) -> None:
    places = [(plot.across(at), plot.up(value)) for at, value in piece]
    if len(places) > 1:
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
        style = f"curve {_style(curve)}"
        ET.SubElement(plot.svg, "polyline", {"points": path, "class": style})
    if has_dots or len(places) == 1:
        for (px, py), (_, value) in zip(places, piece, strict=True):
            dot = plot.element("circle", f"dot {_style(curve)}", cx=px, cy=py, r=3.5)
            ET.SubElement(dot, "title").text = f"{curve.name} {value:,.4g}".strip()


def _bar(plot: Plot, low: float, high: float, count: int) -> None:
    left, top = plot.across(low), plot.up(count)
    bar = plot.element(
        "rect", "bar c0", x=left, y=top, width=max(plot.across(high) - left - 0.5, 0.5),
        height=plot.base - top,
    )  # fmt: skip
    ET.SubElement(bar, "title").text = f"{low:.4g} to {high:.4g}: {count:,}"


class Plot:
    """An SVG with its axes drawn, and where values lie in it."""

    def __init__(self, title: str, x: Axis, y: Axis, legend: Sequence[Curve] = ()) -> None:
        self._x, self._y = x, y
        self.svg = ET.Element("svg", {"role": "img"})
        ET.SubElement(self.svg, "title").text = title
        self._top = TOP + LEGEND_ROW * self._legend(legend)
        self.base = self._top + PLOT_HEIGHT
        self.svg.set("viewBox", f"0 0 {WIDTH} {self.base + BOTTOM}")
        self._axes()

    def across(self, value: float) -> float:
        """Where a value of the lower axis lies."""
        return LEFT + self._x.share(value) * (WIDTH - LEFT - RIGHT)

    def up(self, value: float) -> float:
        """Where a value of the upright axis lies."""
        return self.base - self._y.share(value) * PLOT_HEIGHT

    def element(self, tag: str, style: str, **numbers: float) -> ET.Element:
        """A new shape of these classes and attributes."""
        attributes = {name: f"{value:.1f}" for name, value in numbers.items()}
        return ET.SubElement(self.svg, tag, {**attributes, "class": style})

    def written(self) -> Markup:
        """As it goes into the page."""
        return Markup(ET.tostring(self.svg, encoding="unicode"))

    def _legend(self, shown: Sequence[Curve]) -> int:
        """Names from left to right below the title; how many rows they took."""
        at, row = float(LEFT), 1
        for curve in shown:
            width = 30 + len(curve.name) * LETTER
            if at + width > WIDTH and at > LEFT:
                at, row = float(LEFT), row + 1
            y = TOP + LEGEND_ROW * row - 14
            self.element("line", f"curve {_style(curve)}", x1=at, x2=at + 18, y1=y, y2=y)
            self._text(curve.name, at + 22, y + 4, "start")
            at += width
        return row if shown else 0

    def _axes(self) -> None:
        right = WIDTH - RIGHT
        for value, name in self._y.ticks:
            at = self.up(value)
            self.element("line", "grid", x1=LEFT, x2=right, y1=at, y2=at)
            self._text(name, LEFT - 6, at + 4, "end")
        every = max(1, math.ceil(len(self._x.ticks) / MOST_NAMES))
        for value, name in self._x.ticks[::every]:
            at = self.across(value)
            self.element("line", "axis", x1=at, x2=at, y1=self.base, y2=self.base + 4)
            self._text(name, at, self.base + 17, "middle")
        self.element("line", "axis", x1=LEFT, x2=right, y1=self.base, y2=self.base)
        self._text(self._x.label, (LEFT + right) / 2, self.base + 36, "middle")
        self._text(self._y.label, 4, 14, "start")

    def _text(self, text: str, x: float, y: float, anchor: str) -> None:
        attributes = {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor}
        ET.SubElement(self.svg, "text", attributes).text = text
