"""PNGs of the report's plots."""

from __future__ import annotations

import builtins

import pytest

from tests.bench.test_report_html import plotted
from tetrad.bench.report.png import named_charts, write
from tetrad.bench.report.pyplot import require_matplotlib
from tetrad.core.errors import UnsupportedError
from tetrad.core.sweep_records import Place


def test_every_plot_of_a_sweep_is_a_file_of_its_own(tmp_path):
    pytest.importorskip("matplotlib")
    points = [plotted().model_copy(update={"place": Place(concurrency=c)}) for c in (8, 16)]
    points.append(points[0].model_copy(update={"run": None, "place": Place(concurrency=32)}))
    written = write(points, tmp_path)
    assert sorted(path.name for path in written) == [
        "concurrency-16-inter-token-latency.png",
        "concurrency-16-output-tokens-per-second.png",
        "concurrency-16-requests-in-flight.png",
        "concurrency-8-inter-token-latency.png",
        "concurrency-8-output-tokens-per-second.png",
        "concurrency-8-requests-in-flight.png",
        "e2e-latency-against-concurrency.png",
        "output-throughput-against-concurrency.png",
        "tpot-against-concurrency.png",
        "ttft-against-concurrency.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG\r\n") for path in written)


def test_names_are_those_of_one_run_or_of_each():
    assert [name for name, _ in named_charts([plotted()])] == [
        "requests-in-flight",
        "output-tokens-per-second",
        "inter-token-latency",
    ]


def test_without_matplotlib_the_flag_says_how_to_get_it(monkeypatch):
    real = builtins.__import__

    def refuse(name, *arguments):
        if name == "matplotlib":
            raise ImportError
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UnsupportedError, match=r"--png needs matplotlib; .*\.\[plot\]"):
        require_matplotlib("--png")
