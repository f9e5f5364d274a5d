"""What `tetrad bench rank` leaves behind."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from tetrad.core.records import CallTime, Ceilings
from tetrad.core.spread import Record


class OpShare(Record):
    """All calls of one op in one part of a model's step."""

    part: str
    """attention, indexer, dense, moe, head; model: what lies outside of these."""
    op: str
    """As the contract is named; "other": torch's own functions between the ops."""
    calls: int
    """In a step; those of torch's own functions are not counted."""
    launches: int
    """Kernels and copies on a GPU; 0 on a CPU."""
    us: float | None
    """Of all calls, by the profiler on a GPU; None where a step has none, or none could be told."""
    flops: float
    """Useful ones."""
    bytes: float
    """Weights and keys that must be read."""
    limit_us: float
    """Reading or computing, whichever takes longer, call by call; 0 for what touches activations
    only."""

    @property
    def share(self) -> float | None:
        """The limit over the time."""
        return None if not self.us or not self.limit_us else self.limit_us / self.us


class RankTiming(Record):
    """One step of one rank of a layout, the others stood in for."""

    kind: Literal["rank_timing"] = "rank_timing"
    schema_version: Literal[1] = 1
    tetrad_version: str
    started_at: str
    """UTC, ISO 8601, of the run."""
    command: str
    device: dict[str, Any]
    """The device and the versions of what drives it."""
    ceilings: Ceilings | None
    """Measured in this run; None where both rates were stated."""
    tb_per_s: float
    """Of memory, as the limits count it."""
    tflops: float
    """Of products, as the limits count it."""
    link_gb_per_s: float
    """Stated, never measured."""
    link_call_us: float = 0.0
    """Latency of one collective, stated; 0: not counted."""
    model: str
    num_layers: int
    """Run; the model may have more."""
    model_layers: int
    ranks: str
    dtype: str
    kv_cache_dtype: str
    """Of keys: as `dtype`, or fp8_e4m3."""
    routing: str
    batch: int
    """Sequences of the whole deployment; of a pipeline, those of one step: as many steps as there
    are stages are under way."""
    sequences: int
    """Of them this rank's."""
    query_len: int
    """Tokens that each computes in the step."""
    context: int
    """Keys that each holds, the new ones among them."""
    backends: dict[str, str]
    """Op → backend."""
    weight_bytes: int
    cache_bytes: int
    """Of the sequences of this step."""
    step: CallTime
    """One step, sampling included, communication left out."""
    link_bytes: dict[str, float]
    """Collective → bytes that the rank would have received in one step."""
    link_calls: dict[str, int]
    """Collective → how often in one step."""
    link_us: float
    """The bytes at the stated speed, without latency and without overlap."""
    limit_us: float
    """The sum of the ops' limits."""
    ops: list[OpShare] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)

    @property
    def share(self) -> float:
        """The limit over the step's time."""
        return self.limit_us / self.step.median_us

    @property
    def tokens_per_s(self) -> float:
        """Of the whole deployment, were communication free."""
        return self.batch * self.query_len / self.step.median_us * 1e6

    @property
    def latency_us(self) -> float:
        """Of a step's collectives, one after the other."""
        return self.link_call_us * sum(self.link_calls.values())

    @property
    def tokens_per_s_with_link(self) -> float:
        """Of the whole deployment, communication added at its price."""
        step_us = self.step.median_us + self.link_us + self.latency_us
        return self.batch * self.query_len / step_us * 1e6

    @property
    def ops_us(self) -> float | None:
        """All ops together, gaps between launches left out; None where none could be told."""
        known = [op.us for op in self.ops if op.us is not None]
        return sum(known) if known else None
