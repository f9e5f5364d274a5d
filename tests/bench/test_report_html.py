"""The report: whole without the network, every foreign text escaped, plots where they belong."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from tests.bench.test_block import run
from tetrad.bench.report.charts import Axis, Chart, Curve
from tetrad.bench.report.html import page
from tetrad.bench.report.plots import varied
from tetrad.bench.report.svg import drawn
from tetrad.bench.sweep.run import alone
from tetrad.core.records import FailureCount
from tetrad.core.series_records import Histogram, Timeline
from tetrad.core.sweep_records import Place, SweepPoint

EVIL = "</pre><script>alert('x')</script><img src=x onerror=y>\"&"


class Tags(HTMLParser):
    """Collects tags and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def plotted(**changes) -> SweepPoint:
    line = Timeline(step_s=0.5, in_flight=[1.0, 2.0, 1.0], tokens_per_s=[5.0, 9.0, 2.0])
    gaps = Histogram(low=4.0, high=6.0, counts=[1, 5, 2], above=3)
    return alone([run(timeline=line, itl_histogram=gaps, **changes)], 0)[0]


def tags(text: str) -> list[tuple[str, dict[str, str | None]]]:
    parser = Tags()
    parser.feed(text)
    return parser.found


def test_everything_from_outside_is_escaped():
    failures = [FailureCount(kind="http_status", count=1, example=EVIL, example_request=0)]
    one = plotted(model=EVIL, backend=EVIL, url=EVIL, notes=[EVIL], failed=1, failures=failures)
    bad = one.model_copy(update={"run": None, "detail": EVIL, "status": "failed"})
    text = page([one, bad], EVIL, {"processor": EVIL})
    names = {tag for tag, _ in tags(text)}
    assert not names & {"script", "img", "link", "iframe", "object"}
    assert not any(key.startswith("on") for _, attributes in tags(text) for key in attributes)
    assert text.count("&lt;script&gt;") >= 6


def test_nothing_is_loaded():
    text = page([plotted()], "tetrad bench serve", {})
    for _, attributes in tags(text):
        assert not set(attributes) & {"src", "href", "xlink:href", "srcset"}
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text


def test_a_run_shows_its_command_machine_plots_and_block():
    text = page([plotted()], "tetrad bench serve --x", {"memory_bytes": 2**30, "gpus": []})
    assert "tetrad bench serve --x" in text
    assert "1.0 GiB" in text
    assert [tag for tag, _ in tags(text)].count("svg") == 3
    assert "Successful requests:                     64" in text


def test_a_sweep_shows_its_curves_and_a_point_that_failed():
    points = [
        plotted().model_copy(update={"place": Place(concurrency=count)}) for count in (8, 16, 32)
    ]
    points[1] = points[1].model_copy(
        update={"run": None, "status": "failed", "detail": "No server."}
    )
    text = page(points, "c", {})
    assert "Serving benchmark: 3 runs" in text
    assert "16 (failed)" in text
    assert "concurrency 16: No server." in text
    assert [tag for tag, _ in tags(text)].count("svg") == 4 + 2 * 3
    assert len(re.findall(r'class="dot', text)) == 2 + 3 * 2 * 2


def test_the_axis_is_what_varies_and_curves_are_the_rest():
    places = [
        Place(concurrency=count, input_len=length, output_len=1)
        for count in (8, 16)
        for length in (1, 2)
    ]
    label, at = varied(places)
    assert label == "concurrency"
    assert at(places[1]) == ("8", "2/1")
    assert varied([Place(), Place(repetition=2)])[1](Place(repetition=2)) == ("2", "")
    assert varied([Place(request_rate=1.0), Place(request_rate="inf")])[0] == "requests/s"


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.0), (5.0, 5.0), (0.0, 1e-9), (3.2, 7e8)])
def test_an_axis_has_ticks_within_it(low: float, high: float):
    axis = Axis.of("x", low, high)
    assert 1 <= len(axis.ticks) <= 8
    assert all(axis.low - 1e-6 <= value <= axis.high + 1e-6 for value, _ in axis.ticks)


@pytest.mark.parametrize(("high", "end"), [(0.0, 1.0), (7.0, 8.0), (803.5, 1000.0), (60.0, 60.0)])
def test_an_axis_from_zero_ends_at_a_tick(high: float, end: float):
    axis = Axis.up_to("y", high)
    assert axis.high == pytest.approx(end)
    assert axis.ticks[-1][0] == pytest.approx(end)


def test_a_curve_is_broken_where_a_value_is_missing():
    axis = Axis.named("n", list("abcde"))
    values = (1.0, 2.0, None, 3.0, 4.0)
    svg = drawn(Chart("t", axis, "y", [Curve("c", list(enumerate(values)))], has_dots=True))
    assert svg.count("<polyline") == 2
    assert svg.count("<circle") == 4


def test_a_long_legend_takes_more_rows():
    axis = Axis.named("n", ["1", "2"])
    shown = [Curve("a rather long name " * 2, [(0, 1.0), (1, 2.0)], n) for n in range(5)]
    few, many = (drawn(Chart("t", axis, "y", shown[:n])) for n in (2, 5))
    heights = [float(re.findall(r'viewBox="0 0 560 (\d+)"', svg)[0]) for svg in (few, many)]
    assert heights[1] > heights[0]


def test_plots_of_one_value_and_of_none():
    axis = Axis.named("n", ["1"])
    assert "<circle" in drawn(Chart("t", axis, "y", [Curve("a", [(0, 0.0)])]))
    assert "<polyline" not in drawn(Chart("t", axis, "y", []))
    assert "<rect" in drawn(Chart("t", Axis.of("x", 7.0, 7.0), "y", counts=[5]))
