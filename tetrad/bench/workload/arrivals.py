"""When each request is due.

Requests arrive in a time of their own, in which one is due per unit on average; the rate over time
turns that into seconds. So the offered number is exact under any rate, and only the gaps are drawn.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from tetrad.bench.options.serve import BenchServeConfig
from tetrad.bench.workload.rates import Piece, parse_profile, when
from tetrad.bench.workload.requests import Prompt


def due_times(config: BenchServeConfig, prompts: Sequence[Prompt], seed: int) -> list[float]:
    """When each request is due, in seconds after the start; 0 for one that waits for another's
    end, which has no place in the schedule."""
    openers = [index for index, prompt in enumerate(prompts) if prompt.after is None]
    if config.use_trace_timestamps:
        times = [prompts[index].trace_s or 0.0 for index in openers]
    else:
        pieces = parse_profile(config.rate_profile)
        times = schedule(
            len(openers),
            config.request_rate,
            seed,
            burstiness=config.burstiness,
            pieces=pieces,
        )
    due = [0.0] * len(prompts)
    for index, time_s in zip(openers, times, strict=True):
        due[index] = time_s
    return due


def offered_rate(config: BenchServeConfig, due_s: Sequence[float]) -> float:
    """Requests per second: as asked; of a profile or a trace the mean up to the last one due."""
    if not config.rate_profile and not config.use_trace_timestamps:
        return config.request_rate
    return round((len(due_s) - 1) / max(due_s), 4) if max(due_s) > 0 else math.inf


def in_words(config: BenchServeConfig) -> str:
    """How requests arrive."""
    if config.use_trace_timestamps:
        return f"the trace's time stamps times {config.mooncake_slowdown_factor:g}"
    if not config.has_rate:
        return "all at once"
    gaps = {1.0: "Poisson", math.inf: "constant gaps"}.get(
        config.burstiness, f"gamma gaps of shape {config.burstiness:g}"
    )
    rates = " ".join(config.rate_profile) or f"{config.request_rate:g} per second"
    return f"{gaps}, {rates}"


def schedule(
    num_requests: int,
    rate: float,
    seed: int,
    *,
    burstiness: float = 1.0,
    pieces: Sequence[Piece] = (),
) -> list[float]:
    """Seconds after the start at which each request is due, ascending; all 0 for an infinite rate.

    Gaps are gamma distributed with shape `burstiness`: exponential at 1 (Poisson arrivals), equal
    at inf. They are scaled so that the last request is due when num_requests - 1 have been offered:
    at (num_requests - 1) / rate, or where `pieces` reach that number, whatever the draw. Times are
    absolute, so a late request delays no later one.
    """
    if not pieces and (math.isinf(rate) or num_requests < 2):
        return [0.0] * num_requests
    places = arrivals(num_requests, burstiness, random.Random(f"arrivals {seed}"))
    if not pieces:
        return [place / rate for place in places]
    return [when(pieces, place) for place in places]


def arrivals(num_requests: int, burstiness: float, rng: random.Random) -> list[float]:
    """Ascending places from 0 to num_requests - 1, with gaps of mean 1."""
    if math.isinf(burstiness) or num_requests < 2:
        return [float(place) for place in range(num_requests)]
    places = [0.0]
    for _ in range(num_requests - 1):
        # The scale below makes the mean 1; this one only keeps very small shapes from vanishing.
        gap = rng.expovariate(1.0) if burstiness == 1 else rng.gammavariate(burstiness, 1.0)
        places.append(places[-1] + gap)
    if places[-1] == 0.0:
        return [float(place) for place in range(num_requests)]
    scale = (num_requests - 1) / places[-1]
    return [place * scale for place in places]
