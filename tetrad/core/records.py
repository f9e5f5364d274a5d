"""What a measurement leaves behind: versioned JSON that later readers can trust.

A record says what was asked, what ran, what came out and what failed. Times are seconds or
milliseconds as the name says; rates are per second of `duration_s`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from pydantic import Field

from tetrad.core.client_records import ClientCheck
from tetrad.core.series_records import Histogram, Timeline
from tetrad.core.serve_records import Further, Steady
from tetrad.core.spread import Record, Spread, percentile
from tetrad.core.telemetry_records import Telemetry

FailureKind = Literal[
    "refused",  # no connection
    "disconnected",  # the connection broke before an answer began
    "http_status",  # an answer other than 200
    "error_event",  # HTTP 200, then an error inside the body or stream
    "malformed",  # an answer that is not what the protocol says
    "truncated",  # the stream ended without a finish reason
    "empty",  # it ended properly, but no token came
    "short_output",  # fewer tokens than asked although end tokens were to be ignored
    "long_output",  # more tokens than asked
    "endless",  # an answer that went on far beyond what was asked, cut off by the client
    "aborted",  # the server says that it gave the request up
    "timeout",  # nothing came for too long
]


class Failure(Record):
    """Why one request does not count."""

    kind: FailureKind
    message: str
    """One line, in the server's words where it has any."""


class FailureCount(Record):
    """How often one kind of failure happened, with one example."""

    kind: FailureKind
    count: int
    example: str
    example_request: int
    """Index of the request of the example."""


class RequestRecord(Record):
    """One request of a run. Times are seconds since the start of the run."""

    index: int
    prompt_tokens: int
    output_tokens: int
    due_s: float
    """When the schedule wanted it sent; the wait for `max_concurrency` is `sent_s - due_s`."""
    sent_s: float
    ended_s: float
    """Last token; for a failure, when it was known."""
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    itls_ms: list[float] = Field(default_factory=list)
    ttat_ms: float | None = None
    """To the first token after reasoning; None when it did not reason."""
    cached_tokens: int | None = None
    text: str = ""
    failure: Failure | None = None


class Workload(Record):
    """What was sent: lengths as they really were, not as they were asked for."""

    dataset: str
    num_prompts: int
    random_input_len: int | None
    random_output_len: int | None
    random_range_ratio: float | None
    """As asked; None for a file."""
    prompt_tokens: Spread
    """Intended by the client; count 0 when it cannot know (text without a tokenizer)."""
    wanted_tokens: Spread
    seed: int
    content_seed: int
    """Seed of the prompts' content; drawn afresh for each run unless a seed was given."""
    request_rate: float | Literal["inf"]
    """As asked; of a profile or a trace the mean that was offered."""
    arrivals: str = ""
    """How requests arrived, in words."""
    max_concurrency: int | None
    stream: bool
    ignore_eos: bool


class Latencies(Record):
    """Of the successful requests, in milliseconds. None: not measurable without streaming.

    e2e: sending the request to its last token. ttft: to its first token. tpot: (e2e - ttft) /
    (output tokens - 1), requests with one token left out. itl: between successive tokens; between
    successive events where the server does not say how many tokens an event carries.
    """

    e2e_ms: Spread
    ttft_ms: Spread | None = None
    tpot_ms: Spread | None = None
    itl_ms: Spread | None = None
    queue_ms: Spread
    """Waited in the client, for `max_concurrency` or because the client was late."""


class Goodput(Record):
    """Requests that met every objective."""

    objectives_ms: dict[str, float]
    """Bounds on ttft, tpot and e2el (end-to-end latency)."""
    requests_per_s: float
    attainment: float
    """Share of the requests that ended, failures among them."""
    attainment_of: dict[str, float]
    """The same for each objective alone."""


class BenchRun(Record):
    """One run of `tetrad bench serve`."""

    kind: Literal["bench_run"] = "bench_run"
    schema_version: Literal[1] = 1
    tetrad_version: str
    started_at: str
    """UTC, ISO 8601."""
    backend: str
    url: str
    model: str | None
    server_info: dict[str, Any] | None
    """The server's own account of itself, as it gave it."""
    workload: Workload
    asked: dict[str, Any] = Field(default_factory=dict)
    """Options that differ from their defaults, without what lets the client in."""
    duration_s: float
    """First request due until last answer complete."""
    completed: int
    failed: int
    unfinished: int = 0
    """Cut off by an interrupt; neither completed nor failed."""
    interrupted: bool = False
    failures: list[FailureCount] = Field(default_factory=list)
    input_tokens: int
    """Prompt tokens of successful requests: the server's count, else the client's."""
    output_tokens: int
    """Tokens that arrived in successful requests."""
    output_tokens_retokenized: int | None = None
    output_tokens_of_failures: int = 0
    cached_tokens: int | None = None
    """Prompt tokens the server took from its cache; None when it does not say."""
    token_source: Literal["server", "tokenizer", "events"]
    """Who counted the output tokens: the server, the client's tokenizer, or one per event."""
    latencies: Latencies
    peak_output_tokens_per_s: float | None
    """Most tokens in one second of the run; None without streaming."""
    peak_concurrency: int
    """Most requests in flight at one instant."""
    concurrency: float
    """Mean number in flight: sum of end-to-end latencies over the duration (Little's law)."""
    goodput: Goodput | None = None
    """None when no objectives were given."""
    further: Further | None = None
    steady: Steady | None = None
    """None when no part of the run was steady, or without streaming."""
    notes: list[str] = Field(default_factory=list)
    """What a reader must know before believing a figure."""
    client: ClientCheck | None = None
    """Whether the load generator itself can be believed; None in records older than this."""
    timeline: Timeline | None = None
    telemetry: Telemetry | None = None
    """None when nothing was sampled beside the load."""
    itl_histogram: Histogram | None = None
    """From the least gap to the 99th percentile, in milliseconds."""
    command: str = ""
    """As typed, secrets masked."""
    machine: dict[str, Any] = Field(default_factory=dict)
    """Where the client ran."""
    requests: list[RequestRecord] = Field(default_factory=list)
    """Every request, when details were asked for."""

    @property
    def request_throughput(self) -> float:
        """Completed requests per second."""
        return self._rate(self.completed)

    @property
    def input_throughput(self) -> float:
        """Prompt tokens of completed requests per second."""
        return self._rate(self.input_tokens)

    @property
    def output_throughput(self) -> float:
        """Output tokens of completed requests per second."""
        return self._rate(self.output_tokens)

    @property
    def cache_hit_share(self) -> float:
        """Share of the prompt tokens that the server took from its cache; 0 when it is silent."""
        return (self.cached_tokens or 0) / self.input_tokens if self.input_tokens else 0.0

    def _rate(self, amount: int) -> float:
        return amount / self.duration_s if self.duration_s > 0 else 0.0


Bound = Literal["memory", "compute"]


class Ceilings(Record):
    """What the device reached in the same run, by the same clock."""

    copy_tb_per_s: float
    """Device to device, bytes read and written."""
    read_tb_per_s: float
    """Reading a long vector."""
    gemm_tflops: float
    """A large square matrix product in the run's dtype."""
    launch_us: float
    """The time of a call that does next to nothing; it is part of every figure."""

    @property
    def tb_per_s(self) -> float:
        """The better of the two bandwidths."""
        return max(self.copy_tb_per_s, self.read_tb_per_s)

    def floor_us(
        self, flops: float, num_bytes: float
    ) -> tuple[float, Literal["memory", "compute"]]:
        """The least time that the ceilings allow, and which of them binds."""
        memory_us = num_bytes / (self.tb_per_s * 1e6)
        compute_us = flops / (self.gemm_tflops * 1e6)
        return (memory_us, "memory") if memory_us >= compute_us else (compute_us, "compute")


WIDE_SPREAD = 3.0
"""So many times as long as the 10th percentile takes the 90th only where something disturbs it."""


class CallTime(Record):
    """How long one call took, in microseconds."""

    median_us: float
    min_us: float
    p10_us: float
    p90_us: float
    repeats: int
    method: Literal["graph", "events", "wall"]
    """Replays of a one-call CUDA graph, CUDA events around the bare call, or a host clock."""
    note: str = ""
    """Why the method is not the best one for the device, or ""."""
    launches: int | None = None
    """Kernels and copies of one call, counted in its graph; None when unknown."""

    @classmethod
    def of(
        cls,
        samples_us: Sequence[float],
        method: Literal["graph", "events", "wall"],
        note: str = "",
        launches: int | None = None,
    ) -> CallTime:
        """Summarise samples, in any order."""
        ordered = sorted(samples_us)
        return cls(
            median_us=percentile(ordered, 50),
            min_us=ordered[0],
            p10_us=percentile(ordered, 10),
            p90_us=percentile(ordered, 90),
            repeats=len(ordered),
            method=method,
            note=note,
            launches=launches,
        )


def disturbance(times: Iterable[CallTime], what: str) -> str | None:
    """A warning where repeats of a call differ as only other work makes them, else None."""
    folds = [t.p90_us / max(t.p10_us, 1e-3) for t in times if t.p90_us > WIDE_SPREAD * t.p10_us]
    if not folds:
        return None
    return (
        f"times differ {max(folds):.0f} fold between repeats, as beside other work: no figure of "
        f"{what} can be relied on"
    )


class LaunchTime(Record):
    """One kernel or copy of a call."""

    name: str
    us: float


class BlockTime(Record):
    """A block of experts against the least it consists of."""

    grouped_us: float
    """The two grouped products of the experts in the same run, by the GPU's profiler."""
    ratio: float
    """The block's median over these."""
    target_us: float
    """What the block may take: 1.15 times the products, and 12 µs more."""


class KernelTiming(Record):
    """One op, one backend, one shape of `tetrad bench kernels`."""

    kind: Literal["kernel_timing"] = "kernel_timing"
    schema_version: Literal[1] = 1
    tetrad_version: str
    started_at: str
    """UTC, ISO 8601, of the run."""
    command: str
    device: dict[str, Any]
    """The device and the versions of what drives it."""
    clocks: dict[str, float] | None = None
    """Right after the call was timed: sm_mhz, power_w, temperature_c; None when unknown."""
    ceilings: Ceilings
    model: str
    ranks: str
    op: str
    backend: str
    case: str
    shape: dict[str, Any]
    dtype: str
    tokens: int
    """Tokens of the step, over all ranks."""
    tokens_per_expert: float | None = None
    """Mean over the experts of the rank."""
    status: Literal["ok", "wrong", "refused", "failed", "skipped"]
    """Only "ok" has a time."""
    detail: str = ""
    """One sentence for every status but "ok"."""
    error: float | None = None
    """Relative L2 error of this very cell; None when it was not computed or not finite."""
    tolerance: float
    flops: float
    """Useful floating-point operations."""
    issued_flops: float | None = None
    """What the backend issued, padding included; None when it does not tell."""
    bytes: float
    """Bytes that must cross the memory bus once."""
    time: CallTime | None = None
    breakdown: list[LaunchTime] = Field(default_factory=list)
    """The call's launches in order, where the GPU's profiler was asked."""
    tflops: float | None = None
    """Useful ones, per second."""
    tb_per_s: float | None = None
    bound: Bound
    """Which ceiling binds."""
    share: float | None = None
    """The least time that the ceilings allow, over the median."""
    plateau_tflops: float | None = None
    """Of products only: the best large dense product of the run, in the activations' type."""
    plateau_share: float | None = None
    """`tflops` over the plateau."""
    block: BlockTime | None = None
    """Of a block of experts, where the GPU's profiler was asked."""
    over_humming: float | None = None
    """The median over Humming's in the same cell, where it was compared."""
