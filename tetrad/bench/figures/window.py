"""Figures beside SGLang's, of the whole run and of its steady part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from tetrad.bench.figures.measure import Answer
from tetrad.core.records import RequestRecord
from tetrad.core.serve_records import Further, Steady
from tetrad.core.spread import Spread

STEADY_SHARE = 0.9
LEAST_STREAMS = 2
"""A load of single requests has no steady part."""


def further(answers: Sequence[Answer], duration_s: float, *, stream: bool) -> Further:
    """See `tetrad/bench/figures/definitions.py`."""
    good = [answer for answer in answers if answer.record.failure is None]
    gaps = [(now - before) * 1e3 for a in good for (before, _), (now, _) in pairwise(a.stamps)]
    answered = [a.record.ttat_ms for a in good if a.record.ttat_ms is not None]
    normal = [e2e_ms(a.record) / a.record.output_tokens for a in good]
    return Further(
        itl_chunk_ms=Spread.of(gaps) if stream else None,
        ttat_ms=Spread.of(answered) if answered else None,
        normalised_ms=Spread.of(normal),
        mean_in_flight=in_flight([a.record for a in answers], 0.0, duration_s),
    )


def e2e_ms(record: RequestRecord) -> float:
    """End-to-end latency."""
    return (record.ended_s - record.sent_s) * 1e3


def in_flight(records: Sequence[RequestRecord], begun_s: float, ended_s: float) -> float:
    """Mean number of requests between sent and ended within [begun_s, ended_s]."""
    if ended_s <= begun_s:
        return 0.0
    parts = (min(r.ended_s, ended_s) - max(r.sent_s, begun_s) for r in records)
    return sum(part for part in parts if part > 0) / (ended_s - begun_s)


def steady(answers: Sequence[Answer]) -> Steady | None:
    """The steady part of a streamed run; None when it has none."""
    good = [a for a in answers if a.record.failure is None and a.stamps]
    span = steady_span([(a.stamps[0][0], a.stamps[-1][0]) for a in good])
    if span is None:
        return None
    begun_s, ended_s = span
    tokens = sum(t for a in good for at, t in a.stamps if begun_s < at <= ended_s)
    ended = [a.record for a in good if begun_s < a.record.ended_s <= ended_s]
    sent = [a.record for a in good if begun_s <= a.record.sent_s < ended_s]
    return Steady(
        begun_s=begun_s,
        ended_s=ended_s,
        completed=len(ended),
        output_tokens=round(tokens),
        output_throughput=tokens / (ended_s - begun_s),
        mean_in_flight=in_flight([a.record for a in answers], begun_s, ended_s),
        ttft_ms=Spread.of([r.ttft_ms for r in sent if r.ttft_ms is not None]),
        tpot_ms=Spread.of([r.tpot_ms for r in ended if r.tpot_ms is not None]),
    )


def steady_span(streams: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """First and last instant at which `STEADY_SHARE` of the peak number of `streams` (first token,
    last token) ran; a long prefill at full concurrency is therefore no part of it."""
    changes = sorted([(first, 1) for first, _ in streams] + [(last, -1) for _, last in streams])
    counts, now = [], 0
    for at, change in changes:
        now += change
        counts.append((at, now))
    peak = max((count for _, count in counts), default=0)
    if peak < LEAST_STREAMS:
        return None
    needed = math.ceil(STEADY_SHARE * peak)
    begun_s = next(at for at, count in counts if count >= needed)
    full = [after for (_, count), (after, _) in pairwise(counts) if count >= needed]
    return (begun_s, full[-1]) if full and full[-1] > begun_s else None


def lines(more: Further | None, part: Steady | None) -> list[str]:
    """What to print of both."""
    told = []
    if more is not None and more.normalised_ms.count:
        figures = [f"normalised latency {more.normalised_ms.mean:.2f} ms a token"]
        if more.itl_chunk_ms is not None and more.itl_chunk_ms.count:
            chunk = more.itl_chunk_ms
            figures.append(f"ITL per chunk {chunk.mean:.2f} (P99 {chunk.p99:.2f}) ms")
        if more.ttat_ms is not None:
            figures.append(f"TTAT {more.ttat_ms.mean:.2f} (P99 {more.ttat_ms.p99:.2f}) ms")
        told.append(f"means: {', '.join(figures)}, in flight {more.mean_in_flight:.2f}")
    if part is not None:
        first = part.ttft_ms
        ttft = f", TTFT {first.mean:.2f} ms of {first.count} that were sent" if first.count else ""
        told.append(
            f"steady from {part.begun_s:.2f} to {part.ended_s:.2f} s: "
            f"{part.output_throughput:.2f} output tok/s, in flight {part.mean_in_flight:.2f}, "
            f"TPOT {part.tpot_ms.mean:.2f} ms of {part.completed} that ended{ttft}"
        )
    return told
