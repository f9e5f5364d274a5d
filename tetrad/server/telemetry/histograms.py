"""Histograms in the tally, as Prometheus has them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from tetrad.server.shared.tally import Tally

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)
TOKENS = tuple(float(4**power) for power in range(11))


class Histogram:
    """Columns: how many values fell below each bound but not the one before, those above all, and
    the values' sum."""

    def __init__(self, tally: Tally, first: int, text: str, bounds: Sequence[float]) -> None:
        self._tally = tally
        self._first = first
        self._text = text
        self._bounds = bounds

    def observe(self, value: float) -> None:
        self._tally.add(self._first + bisect_left(self._bounds, value))
        self._tally.add(self._first + len(self._bounds) + 1, value)

    def family(self, name: str, labels: Mapping[str, str]) -> HistogramMetricFamily:
        """The sums over all processes, under a name."""
        columns = range(self._first, self._first + len(self._bounds) + 2)
        *counts, values_sum = map(self._tally.total, columns)
        names = map(floatToGoString, (*self._bounds, float("inf")))
        buckets = list(zip(names, accumulate(counts), strict=True))
        family = HistogramMetricFamily(name, self._text, labels=tuple(labels))
        family.add_metric(tuple(labels.values()), buckets, values_sum)
        return family
