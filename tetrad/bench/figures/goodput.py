"""Goodput: requests that met every objective, per second.

An objective is a bound on a request's TTFT, TPOT or end-to-end latency, in milliseconds. A failed
request misses all of them, so attainment is over the requests that ended, not over the good ones. A
request with one output token has no TPOT and meets any bound on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tetrad.core.records import Goodput, RequestRecord

NAMES = {"ttft": "ttft", "tpot": "tpot", "e2el": "e2el", "e2e": "e2el"}


def parse_objectives(words: Sequence[str]) -> dict[str, float]:
    """Name → milliseconds from NAME:MS. Raises ValueError that names the word."""
    objectives: dict[str, float] = {}
    for word in words:
        name, _, bound = word.partition(":")
        try:
            bound_ms = float(bound)
        except ValueError:
            bound_ms = math.nan
        if name not in NAMES or not 0 < bound_ms < math.inf:
            raise ValueError(
                f"{word!r} is no objective; write ttft:500, tpot:50 or e2el:20000, in milliseconds"
            )
        if NAMES[name] in objectives:
            raise ValueError(f"{NAMES[name]} has two bounds; give one")
        objectives[NAMES[name]] = bound_ms
    return objectives


def goodput(
    objectives: Mapping[str, float], records: Sequence[RequestRecord], duration_s: float
) -> Goodput:
    """How many of `records`, all requests that ended, met the objectives."""
    met = [_met(objectives, record) for record in records]
    num_good = sum(all(one.values()) for one in met)
    total = max(1, len(records))
    return Goodput(
        objectives_ms=dict(objectives),
        requests_per_s=num_good / duration_s if duration_s > 0 else 0.0,
        attainment=num_good / total,
        attainment_of={name: sum(one[name] for one in met) / total for name in objectives},
    )


def _met(objectives: Mapping[str, float], record: RequestRecord) -> dict[str, bool]:
    if record.failure is not None:
        return dict.fromkeys(objectives, False)
    took_ms = {
        "ttft": math.inf if record.ttft_ms is None else record.ttft_ms,
        "tpot": record.tpot_ms or 0.0,
        "e2el": (record.ended_s - record.sent_s) * 1e3,
    }
    return {name: took_ms[name] <= bound for name, bound in objectives.items()}
