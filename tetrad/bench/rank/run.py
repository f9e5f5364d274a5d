"""One rank's step: its program, its time, its limit.

The model is made of the layers that serve, with drawn weights of the rank's shapes; the other ranks
are stood in for (`distributed/rehearsal.py`). A step computes one token of each of the rank's
sequences, or a chunk of a prompt, and samples. It is captured in a CUDA graph and replayed where
that can be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from tetrad import __version__
from tetrad.bench.kernels.ceilings import measure_ceilings
from tetrad.bench.rank.trace import Label, Spent, Trace
from tetrad.core.arch import ModelArch
from tetrad.core.errors import ConfigError
from tetrad.core.keys import ACTIVATION, FP8, KeyFormat
from tetrad.core.rank_records import OpShare, RankTiming
from tetrad.core.ranks import Ranks
from tetrad.core.records import CallTime, Ceilings, disturbance
from tetrad.core.step import PAGE_TOKENS
from tetrad.distributed.rehearsal import Rehearsal, Routing, Traffic
from tetrad.formats import fp8_keys
from tetrad.kernels.device import device_memory, snapshot
from tetrad.kernels.select import OP_NAMES, OpSet, resolve_ops
from tetrad.kernels.timer import Timer, timer_for
from tetrad.layers.batch import ForwardBatch
from tetrad.layers.cache import KvCache
from tetrad.models.base import Model
from tetrad.models.dummy import dummy_model
from tetrad.roofline.cost import OpCall, StepLoad, step_calls
from tetrad.roofline.limits import Rates

CEILINGS_BUDGET_S = 4.0
DRAWN_PAGES = 251
"""As many have keys of their own, the others those of these again. A prime: pages of a sequence lie
as many apart as there are sequences, and should differ."""


@dataclass(frozen=True)
class RankBench:
    """What to run."""

    arch: ModelArch
    """Of the whole model, with as many layers as are run."""
    model: str
    model_layers: int
    ranks: Ranks
    batches: tuple[int, ...]
    query_len: int
    context: int
    routing: Routing
    seed: int
    forced: dict[str, str]
    """Op → backend, or "auto"."""
    tb_per_s: float | None
    """None: measured."""
    tflops: float | None
    link_gb_per_s: float
    link_call_us: float
    dtype: torch.dtype
    keys: KeyFormat
    device: torch.device
    budget_s: float
    command: str

    def load(self, batch: int) -> StepLoad:
        """A step with `batch` sequences."""
        return StepLoad(batch, self.context, self.dtype.itemsize, self.query_len, self.keys)

    def sequences(self, batch: int) -> int:
        """Of `batch`, those of this rank."""
        return self.load(batch).sequences(self.ranks)


@dataclass(frozen=True)
class TimedStep:
    """A step that was timed and can be run again."""

    batch: int
    call: Callable[[], Tensor]
    traffic: Traffic
    time: CallTime


def run(
    plan: RankBench, tell: Callable[[str], None], timer: Timer | None = None
) -> Iterator[RankTiming]:
    """One record for each batch. Raises ConfigError when memory does not hold the rank, or after
    the last batch that it holds."""
    steps = []
    full: torch.OutOfMemoryError | None = None
    try:
        stage = Stage(plan, tell, timer or timer_for(plan.device))
        for batch in plan.batches:
            tell(f"timing a step of {batch} sequences")
            steps.append(stage.timed(batch))
    except torch.OutOfMemoryError as error:
        full = error
    # Later, since a profiler that was on once may slow down what comes after.
    for step in steps:
        tell(f"looking into a step of {step.batch} sequences")
        yield stage.record(step)
    if full is not None:
        raise ConfigError(
            f"The rank's weights and keys do not fit into {plan.device}; --num-layers below "
            f"{plan.arch.num_layers}, a smaller --batch or a shorter --context take less: {full}"
        )


class Stage:
    """The rank's model with all it needs, for steps of any of the batches."""

    def __init__(self, plan: RankBench, tell: Callable[[str], None], timer: Timer) -> None:
        self.plan, self.timer = plan, timer
        self.started_at = datetime.now(UTC).isoformat(timespec="seconds")
        self.ops = resolve_ops(
            str(plan.device), plan.forced, plan.dtype, plan.arch, tell, plan.keys
        )
        tell("measuring what the device can do at best")
        self.ceilings, self.rates = _rates(plan, timer)
        most = max(map(plan.sequences, plan.batches))
        self._check_keys(most * _pages(plan.context))
        self.rehearsal = Rehearsal(
            plan.ranks, plan.arch, most_rows=most * plan.query_len, routing=plan.routing,
            seed=plan.seed, device=plan.device, dtype=plan.dtype,
        )  # fmt: skip
        self.trace = Trace(plan.device)
        num_layers = plan.ranks.arch_of(plan.arch).num_layers
        tell(f"drawing the weights of {num_layers} layers")
        self.watched = self.trace.wrapped(self.ops)
        self.model = _model(plan, self.watched, self.rehearsal)
        self.trace.watch(self.model)
        self.page_bytes = KvCache.bytes_per_page(self.model.arch, plan.dtype, plan.keys)
        self.cache = filled_cache(self.model, most * _pages(plan.context), plan)

    def _check_keys(self, num_pages: int) -> None:
        """Raise ConfigError where memory does not hold as many pages: a CPU's allocator says so in
        its own words, or not until the system ends the process."""
        plan = self.plan
        page_bytes = KvCache.bytes_per_page(plan.ranks.arch_of(plan.arch), plan.dtype, plan.keys)
        free_bytes = device_memory(plan.device).free_bytes
        if num_pages * page_bytes > free_bytes:
            raise ConfigError(
                f"The keys of {max(plan.batches)} sequences with {plan.context} each take "
                f"{num_pages * page_bytes / 1e9:.3g} GB, and {plan.device} has "
                f"{free_bytes / 1e9:.3g} GB free; a smaller --batch, a shorter --context or fewer "
                "--num-layers take less."
            )

    def timed(self, batch: int) -> TimedStep:
        """Run a step, count what it would receive, and time it."""
        plan = self.plan
        inputs = step_batch(
            plan.sequences(batch), plan.query_len, plan.context, plan.arch.vocab, plan.device
        )

        def call() -> Tensor:
            out = self.model(inputs, self.cache)
            if not plan.ranks.is_last_stage:
                return out
            ids: Tensor = self.watched.sample(out, None)
            return ids

        # Once before anything counts: kernels are compiled then.
        call()
        self.rehearsal.traffic = traffic = Traffic()
        call()
        self.rehearsal.traffic = Traffic()
        time = self.timer.time([call], plan.budget_s / len(plan.batches))
        return TimedStep(batch, call, traffic, time)

    def record(self, step: TimedStep) -> RankTiming:
        """See where the step's time goes, and compare it with its limit."""
        plan, batch = self.plan, step.batch
        spent = self.trace.measure(step.call)
        calls = step_calls(plan.arch, plan.ranks, plan.load(batch))
        num_pages = plan.sequences(batch) * _pages(plan.context)
        return RankTiming(
            **self._about(),
            batch=batch,
            sequences=plan.sequences(batch),
            cache_bytes=num_pages * self.page_bytes,
            step=step.time,
            link_bytes=step.traffic.num_bytes,
            link_calls=step.traffic.num_calls,
            link_us=self.rates.link_us(step.traffic.total_bytes),
            limit_us=sum(map(self.rates.limit_us, calls)),
            ops=op_shares(calls, spent, self.rates),
            notes=self._notes(step, spent is not None),
        )

    def _notes(self, step: TimedStep, is_traced: bool) -> list[str]:
        notes, batch = [], step.batch
        if warning := disturbance([step.time], "this step"):
            notes.append(warning)
        if batch % self.plan.ranks.attn_dp:
            notes.append(
                f"{batch} sequences do not lie evenly over {self.plan.ranks.attn_dp} groups; this "
                "rank has one more than others"
            )
        if not is_traced:
            notes.append("the profiler lost launches, so ops have no times")
        return notes

    def _about(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "tetrad_version": __version__,
            "started_at": self.started_at,
            "command": plan.command,
            "device": snapshot(plan.device).as_dict(),
            "ceilings": self.ceilings,
            "tb_per_s": self.rates.tb_per_s,
            "tflops": self.rates.tflops,
            "link_gb_per_s": self.rates.link_gb_per_s,
            "link_call_us": plan.link_call_us,
            "model": plan.model,
            "num_layers": self.model.arch.num_layers,
            "model_layers": plan.model_layers,
            "ranks": str(plan.ranks),
            "dtype": (name := str(plan.dtype).removeprefix("torch.")),
            "kv_cache_dtype": name if plan.keys == ACTIVATION else plan.keys,
            "routing": plan.routing,
            "query_len": plan.query_len,
            "context": plan.context,
            "backends": {name: getattr(self.ops, name).name for name in OP_NAMES},
            "weight_bytes": self.model.weight_bytes,
        }


def _rates(plan: RankBench, timer: Timer) -> tuple[Ceilings | None, Rates]:
    """As stated, else as measured."""
    ceilings = None
    tb_per_s, tflops = plan.tb_per_s, plan.tflops
    if tb_per_s is None or tflops is None:
        ceilings = measure_ceilings(timer, plan.dtype, plan.device, CEILINGS_BUDGET_S)
        tb_per_s = tb_per_s or ceilings.tb_per_s
        tflops = tflops or ceilings.gemm_tflops
    return ceilings, Rates(tb_per_s, tflops, plan.link_gb_per_s)


def _model(plan: RankBench, ops: OpSet, rehearsal: Rehearsal) -> Model:
    return dummy_model(
        plan.arch,
        device=plan.device,
        dtype=plan.dtype,
        ops=ops,
        others=rehearsal,
        seed=plan.seed,
        is_skewed=plan.routing == "skewed",
    )


def _pages(context: int) -> int:
    return -(-context // PAGE_TOKENS)


def filled_cache(model: Model, num_pages: int, plan: RankBench) -> KvCache:
    """Every slot holds a key of the size that norms leave."""
    arch = model.arch
    assert isinstance(arch, ModelArch), arch
    cache = KvCache(arch, num_pages, plan.device, plan.dtype, plan.keys)
    generator = torch.Generator(plan.device).manual_seed(plan.seed)

    def drawn(*widths: int) -> list[Tensor]:
        size = min(DRAWN_PAGES, num_pages), PAGE_TOKENS
        return [
            torch.randn(*size, width, generator=generator, device=plan.device) for width in widths
        ]

    mla, indexer = arch.mla, arch.indexer
    for pool in cache.latent:
        keys = drawn(mla.kv_lora_rank, mla.rope_dim)
        is_fp8 = plan.keys == FP8
        _repeat(fp8_keys.encode_latents(*keys) if is_fp8 else torch.cat(keys, dim=-1), pool)
    for pool in cache.index_keys.values():
        (key,) = drawn(indexer.head_dim)
        _repeat(fp8_keys.encode_index_keys(key) if plan.keys == FP8 else key, pool)
    return cache


def _repeat(pages: Tensor, pool: Tensor) -> None:
    for first in range(0, len(pool), len(pages)):
        part = pool[first : first + len(pages)]
        part.copy_(pages[: len(part)])


def step_batch(
    sequences: int, query_len: int, context: int, vocab: int, device: torch.device
) -> ForwardBatch:
    """`sequences` with `context` keys each, whose last `query_len` tokens are computed. Pages of a
    sequence lie apart."""
    num_pages = _pages(context)
    order = torch.arange(sequences * num_pages, dtype=torch.int32)
    pages = order.view(num_pages, sequences).T.contiguous()
    new = torch.arange(context - query_len, context)
    slots = pages[:, new // PAGE_TOKENS].long() * PAGE_TOKENS + new % PAGE_TOKENS
    starts = torch.arange(sequences + 1, dtype=torch.int32) * query_len
    return ForwardBatch(
        token_ids=(torch.arange(sequences * query_len) * 7919 % vocab).to(device),
        positions=new.repeat(sequences).to(device),
        slots=slots.flatten().to(device),
        query_start=starts.to(device),
        kv_lens=torch.full((sequences,), context, dtype=torch.int32).to(device),
        page_table=pages.to(device),
        logit_rows=(starts[1:] - 1).long().to(device),
        query_lens=(query_len,) * sequences,
        kv_lens_host=(context,) * sequences,
    )


def op_shares(
    calls: tuple[OpCall, ...], spent: dict[Label, Spent] | None, rates: Rates
) -> list[OpShare]:
    """One row for each op of each part, those that took longest first."""
    spent = spent or {}
    labels = dict.fromkeys([*spent, *((call.part, call.op) for call in calls)])
    rows = []
    for part, op in labels:
        mine = [call for call in calls if (call.part, call.op) == (part, op)]
        took = spent.get((part, op))
        rows.append(
            OpShare(
                part=part,
                op=op,
                calls=took.calls if took else 0,
                launches=took.launches if took else 0,
                us=took.us if took else None,
                flops=sum(call.flops * call.count for call in mine),
                bytes=sum(call.bytes * call.count for call in mine),
                limit_us=sum(map(rates.limit_us, mine)),
            )
        )
    return sorted(rows, key=lambda row: -(row.us or row.limit_us))
