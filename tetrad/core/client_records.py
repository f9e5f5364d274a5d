"""What a load generator saw of itself during a run."""

from __future__ import annotations

from pydantic import Field

from tetrad.core.spread import Record, Spread


class ClientCheck(Record):
    """Whether the client can be believed. Lags are in milliseconds."""

    processes: int
    cpu_s: float
    """Of all load processes, during the load."""
    us_per_token: float | None
    """CPU microseconds for each token that came."""
    cpu_shares: list[float]
    """Of one core, for each process: mean over the load."""
    busiest_second: float
    """Largest share of a core that one process used in a second or so; 0 for shorter loads."""
    waited_share: float
    """Share of the load for which a process was ready to run and another had its core."""
    read_lag_ms: Spread
    """How long, at most, bytes lay before they were read and stamped: one value for each event."""
    send_lag_ms: Spread
    """From the moment when a request was due and had a slot until it was sent."""
    loop_lag_ms: Spread
    """How late timers of the event loop were, beyond their resolution of 1 ms."""
    unread_share: float
    """Share of sampled connections in which bytes lay unread."""
    unread_bytes: float
    """Mean over the sampled connections."""
    ttft_bias_ms: float | None
    """Mean read lag of first tokens; it or the mean lag of the loop, whichever is more, is what the
    client added to the mean TTFT, at most."""
    tpot_bias_ms: float | None
    """Mean of |read lag of the last token - of the first| / (tokens - 1)."""
    itl_median_over_mean: float | None
    """Far below 1 when tokens are read in lumps: the server sends them so, or the client lags."""
    invalid: list[str] = Field(default_factory=list)
    """Why the figures must not be used; empty when they may be."""
