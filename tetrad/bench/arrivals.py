"""When each request is due."""

from __future__ import annotations

import math
import random


def schedule(num_requests: int, rate: float, seed: int) -> list[float]:
    """Seconds after the start at which each request is due, ascending; all 0 for an infinite rate.

    Poisson arrivals: gaps are exponential, and the whole schedule is scaled so that the last
    request is due at (num_requests - 1) / rate: the offered rate is exact, whatever the draw. Times
    are absolute, so a late request delays no later one.
    """
    if math.isinf(rate) or num_requests < 2:
        return [0.0] * num_requests
    rng = random.Random(f"arrivals {seed}")
    due = [0.0]
    for _ in range(num_requests - 1):
        due.append(due[-1] + rng.expovariate(1.0))
    scale = (num_requests - 1) / rate / due[-1]
    return [time_s * scale for time_s in due]
