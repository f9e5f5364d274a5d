"""What was seen beside a load: of the GPUs, of the server's own account, and what looking cost.

Times are seconds since the start of the run; those before 0 belong to its eve. Lists of one series
are as long as its times. None stands for what a GPU or a server does not tell.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tetrad.core.spread import Record

Values = list[float | None]
Dialect = Literal["tetrad", "sglang", "vllm", "llamacpp"]


class GpuSeries(Record):
    """One GPU over the run."""

    index: int
    """As nvidia-smi numbers them."""
    name: str
    uuid: str
    power_limit_w: float | None
    max_sm_mhz: float | None
    memory_total_bytes: float | None
    power_w: Values
    sm_mhz: Values
    memory_mhz: Values
    busy: Values
    """Share of the time in which some kernel was resident, however few units it used."""
    memory_busy: Values
    """Share of the time in which memory was read or written."""
    memory_used_bytes: Values
    temperature_c: Values
    throttle_bits: list[int | None]
    """NVML's clock event reasons; of samples that were joined, all that any had."""
    throttle: dict[str, float] = Field(default_factory=dict)
    """Share of the samples within the run that had each reason for lower clocks."""
    energy_j: float | None = None
    """Between the run's start and end."""
    energy_source: Literal["counter", "power"] | None = None
    """The GPU's own counter, or power integrated over the samples."""


class ServerSeries(Record):
    """The server's account of itself. Totals are differences between before and after the run."""

    source: str
    """The route that was asked."""
    dialect: Dialect
    times_s: list[float]
    running: Values
    queued: Values
    cache_usage: Values
    """Share of the KV cache in use, 0 to 1."""
    tokens_per_s: Values
    """Output tokens per second: the server's gauge, or its counter's rise since the last look."""
    retractions: int | None = None
    """Requests set back for want of cache."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    generated_tokens: int | None = None
    cache_hit_share: float | None = None
    """Prompt tokens that came from the prefix cache; where the server counts look-ups, of those."""
    silent_s: float = 0.0
    """How long before the run's end the server answered last; 0 when it did afterwards. Totals end
    with that answer."""


class SamplerCost(Record):
    """What the sampler, a process of its own, used of this machine and of the server."""

    cpu_s: float
    share: float
    """Of one core, while it watched."""
    gpu_reads: int
    gpu_read_ms: float
    """Mean time of one look at all GPUs."""
    server_reads: int
    server_read_ms: float
    """Mean time of one answer of the server."""
    longest_server_read_ms: float
    failed_server_reads: int


class Telemetry(Record):
    """What was sampled beside one run."""

    period_s: float
    gpu_times_s: list[float] = Field(default_factory=list)
    gpus: list[GpuSeries] = Field(default_factory=list)
    why_no_gpus: str = ""
    mean_power_w: float | None = None
    """Of all these GPUs together, `energy_j` over the duration."""
    energy_j: float | None = None
    energy_per_token_j: float | None = None
    """`energy_j` over the output tokens of successful requests."""
    server: ServerSeries | None = None
    why_no_server: str = ""
    cost: SamplerCost | None = None
