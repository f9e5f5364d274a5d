"""Whether the load generator can be believed: what it saw of itself against what it measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tetrad.bench.figures.measure import Answer
from tetrad.bench.load.processes import Outcome
from tetrad.core.client_records import ClientCheck
from tetrad.core.spread import Spread

MOST_SHARE = 0.01
"""Of a mean TTFT or TPOT that may be the client's own."""
LEAST_MS = 1.0
"""A lag below the resolution of the loop's timers spoils no time to first token."""
MOST_UNREAD_SHARE = 0.5
"""With bytes unread in more of its connections than this, the client is behind all the time."""
FULL_SHARE = 0.8
"""A process that used so much of a core, if only for a second, has too much to do."""
LUMPS = 0.5
"""A median ITL below this share of the mean tells of tokens that were read in lumps."""


def check(
    outcome: Outcome, answers: Sequence[Answer], *, has_cap: bool, stream: bool
) -> ClientCheck:
    """Everything the client knows of itself. `answers` are of all requests that finished."""
    good = [answer for answer in answers if answer.record.failure is None]
    seen, duration_s = outcome.watched, outcome.duration_s
    cpu_s = sum(watched.cpu_s for watched in seen)
    tokens = sum(answer.record.output_tokens for answer in answers)
    ready = {trace.index: trace.ready_s for trace in outcome.traces}
    unread = [waiting for watched in seen for waiting in watched.unread]
    gaps = np.array([gap for answer in good for gap in answer.record.itls_ms])
    found = ClientCheck(
        processes=len(seen),
        cpu_s=cpu_s,
        us_per_token=cpu_s / tokens * 1e6 if tokens else None,
        cpu_shares=[_share(watched.cpu_s, duration_s) for watched in seen],
        busiest_second=max((b for watched in seen for b in watched.busy), default=0.0),
        waited_share=_share(max(watched.waited_s for watched in seen), duration_s),
        read_lag_ms=Spread.of((outcome.read_lag_s * 1e3).tolist()),
        send_lag_ms=Spread.of([(a.record.sent_s - ready[a.record.index]) * 1e3 for a in answers]),
        loop_lag_ms=Spread.of([late_s * 1e3 for watched in seen for late_s in watched.late_s]),
        unread_share=sum(waiting > 0 for waiting in unread) / len(unread) if unread else 0.0,
        unread_bytes=sum(unread) / len(unread) if unread else 0.0,
        ttft_bias_ms=_ttft_bias_ms(outcome, good) if stream else None,
        tpot_bias_ms=_tpot_bias_ms(outcome, good) if stream else None,
        itl_median_over_mean=float(np.median(gaps) / gaps.mean()) if gaps.sum() > 0 else None,
    )
    is_free = has_cap or all(answer.record.due_s == 0 for answer in answers)
    return found.model_copy(update={"invalid": list(_faults(found, good, in_time=not is_free))})


def _share(part_s: float, whole_s: float) -> float:
    return part_s / whole_s if whole_s > 0 else 0.0


def _ttft_bias_ms(outcome: Outcome, good: Sequence[Answer]) -> float | None:
    first = [outcome.event_lags_s[a.record.index][0] for a in good]
    return float(np.mean(first)) * 1e3 if first else None


def _tpot_bias_ms(outcome: Outcome, good: Sequence[Answer]) -> float | None:
    shifts = []
    for answer in good:
        if answer.record.output_tokens > 1:
            first, last = outcome.event_lags_s[answer.record.index]
            shifts.append(abs(last - first) / (answer.record.output_tokens - 1))
    return float(np.mean(shifts)) * 1e3 if shifts else None


def _faults(found: ClientCheck, good: Sequence[Answer], *, in_time: bool) -> Iterator[str]:
    """One sentence for each thing that spoils the figures. `in_time`: requests had a schedule of
    their own, so sending late is another load than the one asked for."""
    ttft = Spread.of([a.record.ttft_ms for a in good if a.record.ttft_ms is not None])
    tpot = Spread.of([a.record.tpot_ms for a in good if a.record.tpot_ms is not None])
    late: list[tuple[str, float | None, str, str, Spread, float]] = []
    if ttft.count:
        late.append(("it read first tokens", found.ttft_bias_ms, "", "TTFT", ttft, LEAST_MS))
        loop_ms = found.loop_lag_ms.mean
        late.append(("its event loop ran", loop_ms, " as did its reads,", "TTFT", ttft, LEAST_MS))
    if tpot.count:
        late.append(("it read tokens", found.tpot_bias_ms, "", "TPOT", tpot, 0.0))
    if in_time and ttft.count:
        send_ms, so = found.send_lag_ms.mean, " another load than asked for,"
        late.append(("it sent requests", send_ms, so, "TTFT", ttft, LEAST_MS))
    cure = _cure(found)
    for what, lag_ms, so, name, spread, least_ms in late:
        if lag_ms is not None and lag_ms > max(least_ms, MOST_SHARE * spread.mean):
            yield (
                f"{what} {lag_ms:.2f} ms late,{so} {lag_ms / spread.mean:.1%} of the mean {name} "
                f"of {spread.mean:.2f} ms, where 1 % may be the client's; {cure}"
            )
    if found.unread_share > MOST_UNREAD_SHARE:
        yield (
            f"bytes lay unread in {found.unread_share:.0%} of its connections: it could not keep up"
            f"; {cure}"
        )


def _cure(found: ClientCheck) -> str:
    """More processes help one that has too much to do, and harm one that has to wait for a core."""
    used = max(found.busiest_second, *found.cpu_shares)
    if used >= FULL_SHARE:
        return (
            f"it used {used:.0%} of a core; give it more processes (--workers), on cores that the "
            "server does not use."
        )
    return (
        f"it used {used:.0%} of a core and waited for one {found.waited_share:.0%} of the time, as "
        "others had them; end those, give the client a core of its own (taskset -c for it and the "
        "server), or run it on another machine."
    )


def _bounds(found: ClientCheck) -> list[str]:
    """What the client adds at most. Its reads cannot tell for how long bytes lay before a loop that
    ran late looked; one that could not keep up knows no bound."""
    if found.ttft_bias_ms is None or found.tpot_bias_ms is None:
        return []
    if found.unread_share > MOST_UNREAD_SHARE:
        return []
    most_ms = max(found.ttft_bias_ms, found.loop_lag_ms.mean)
    return [
        f"client: adds at most {most_ms:.2f} ms to the mean TTFT and {found.tpot_bias_ms:.4f} ms "
        "to the mean TPOT"
    ]


def lines(found: ClientCheck) -> list[str]:
    """What to print of it."""
    cost = "" if found.us_per_token is None else f", {found.us_per_token:.1f} us of CPU a token"
    shares = ", ".join(f"{share:.0%}" for share in found.cpu_shares)
    told = [
        f"client: {found.processes} process{'es' if found.processes > 1 else ''} at {shares} of a "
        f"core (busiest second {found.busiest_second:.0%}, waiting for a core "
        f"{found.waited_share:.0%}){cost}",
        f"client: read lag mean {found.read_lag_ms.mean:.2f} P99 {found.read_lag_ms.p99:.2f} ms, "
        f"send lag mean {found.send_lag_ms.mean:.2f} P99 {found.send_lag_ms.p99:.2f} ms, loop lag "
        f"mean {found.loop_lag_ms.mean:.2f} max {found.loop_lag_ms.max:.2f} ms, unread "
        f"{found.unread_bytes:.0f} bytes a connection",
    ]
    told += _bounds(found)
    ratio = found.itl_median_over_mean
    if ratio is not None and ratio < LUMPS:
        told.append(
            f"client: the median ITL is {ratio:.0%} of its mean: tokens came in lumps, from the "
            "server where the read lag above is small"
        )
    return told + [f"INVALID: the client was too slow: {fault}" for fault in found.invalid]
