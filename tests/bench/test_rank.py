"""A rank's step on its own: inputs, marks, sums, and that the step is the layers' own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from tests.bench.test_kernels import FixedTimer
from tetrad.bench.kernels import breakdown as kernels_breakdown
from tetrad.bench.rank import run as rank
from tetrad.bench.rank.run import RankBench, Stage, op_shares, run, step_batch
from tetrad.bench.rank.trace import OTHER, REST, Spent, Trace, spent, stretches
from tetrad.core.arch import ModelArch
from tetrad.core.errors import ConfigError
from tetrad.core.keys import ACTIVATION, FP8
from tetrad.core.rank_records import OpShare, RankTiming
from tetrad.core.ranks import Ranks
from tetrad.core.records import CallTime
from tetrad.data import embedded_model
from tetrad.kernels.select import resolve_ops
from tetrad.kernels.timer import timer_for
from tetrad.roofline.cost import OpCall
from tetrad.roofline.limits import Rates

CPU = torch.device("cpu")
ARCH = ModelArch.from_folder(embedded_model())
EIGHT = Ranks(tp=8, ep=8, attn_dp=8)


def plan(**changes: Any) -> RankBench:
    values: dict[str, Any] = {
        "arch": ARCH, "model": "abacus", "model_layers": 6, "ranks": EIGHT, "batches": (16,),
        "query_len": 1, "context": 100, "routing": "random", "seed": 0, "forced": {},
        "tb_per_s": 0.01, "tflops": 0.05, "link_gb_per_s": 10.0, "link_call_us": 0.0,
        "dtype": torch.float32, "keys": ACTIVATION,
        "device": CPU, "budget_s": 1.0, "command": "tetrad bench rank",
    }  # fmt: skip
    return RankBench(**(values | changes))


def rows(plan: RankBench, us: float = 4000.0) -> list[RankTiming]:
    return list(run(plan, lambda _: None, FixedTimer(us)))


def test_fp8_keys_take_fewer_bytes():
    plain, small = (rows(plan(keys=keys, context=200))[0] for keys in (ACTIVATION, FP8))
    assert (plain.kv_cache_dtype, small.kv_cache_dtype) == ("float32", "fp8_e4m3")
    per_token = 6 * (64 + 4 + 2 * 16) + len(ARCH.indexer.full_layers) * (32 + 4)
    assert small.cache_bytes == 2 * 256 * per_token
    read = {row.op: row.bytes for row in small.ops}
    assert 0 < read["mla"] < {row.op: row.bytes for row in plain.ops}["mla"]


def test_a_step_of_a_rank():
    (row,) = rows(plan())
    assert (row.batch, row.sequences) == (16, 2)
    assert row.tokens_per_s == pytest.approx(4000)
    assert row.tokens_per_s_with_link < row.tokens_per_s
    assert row.share == row.limit_us / 4000.0
    assert row.ceilings is None
    assert row.notes == []
    assert row.weight_bytes > 0


def test_a_step_receives_what_it_receives_once():
    """However often it ran: five layers with experts, the rows for the head, its logits."""
    (row,) = rows(plan())
    assert row.link_calls == {"dispatch": 5, "combine": 5, "all_gather": 1, "join_vocab": 1}
    sent = 7 * 2 * ARCH.hidden * 4
    slots = 7 * 2 * ARCH.moe.experts_per_token * 12
    logits = 2 * ARCH.vocab * 4 * 7 / 8
    assert row.link_bytes == {
        "dispatch": 5 * (sent + slots), "combine": 5 * sent, "all_gather": sent,
        "join_vocab": logits,
    }  # fmt: skip
    assert row.link_us == pytest.approx((11 * sent + 5 * slots + logits) / 10e3)


def test_the_link_s_price_is_its_bytes_and_each_collective_s_latency():
    """12 collectives of 25 µs beside a step of 4000."""
    bare, late = (rows(plan(link_call_us=us))[0] for us in (0.0, 25.0))
    assert (bare.latency_us, late.latency_us) == (0.0, 300.0)
    assert bare.link_us == late.link_us
    assert bare.tokens_per_s_with_link == pytest.approx(16e6 / (4000 + bare.link_us))
    assert late.tokens_per_s_with_link == pytest.approx(16e6 / (4300 + bare.link_us))
    assert late.tokens_per_s == bare.tokens_per_s


def test_every_op_of_a_step_is_seen_in_its_part():
    (row,) = rows(plan())
    calls = {(op.part, op.op): op.calls for op in row.ops}
    assert calls["attention", "mla"] == 6
    assert calls["attention", "linear"] == 6 * 2
    assert calls["attention", "router"] == calls["attention", "latents"] == 6
    assert calls["indexer", "linear"] == len(ARCH.indexer.full_layers)
    assert calls["indexer", "index_score"] == len(ARCH.indexer.full_layers)
    assert calls["moe", "experts"] == 5
    assert calls["dense", "linear"] == 2
    assert calls["head", "router"] == 1
    assert calls[REST, "sample"] == 1
    assert all(op.us is not None and op.us >= 0 for op in row.ops)


def test_every_limit_meets_an_op_that_ran():
    """Else a part's limit would be counted and its time would not."""
    for context in (30, 100):
        (row,) = rows(plan(context=context))
        assert [(op.part, op.op) for op in row.ops if op.limit_us and op.us is None] == []
        assert sum(op.limit_us for op in row.ops) == pytest.approx(row.limit_us)


def test_uneven_batches_are_said_to_be():
    (row,) = rows(plan(batches=(9,)))
    assert row.sequences == 2
    assert "do not lie evenly over 8 groups" in row.notes[0]


@pytest.mark.parametrize(
    "ranks", [Ranks(), Ranks(tp=4, ep=2), Ranks(tp=4, ep=4, attn_dp=2)], ids=str
)
def test_other_layouts_run(ranks: Ranks):
    (row,) = rows(plan(ranks=ranks, routing="skewed", context=30))
    assert row.sequences == 16 // ranks.attn_dp
    assert bool(row.link_calls) == (ranks.size > 1)


def test_a_step_repeats_itself():
    """Weights, keys and routing are seeded, and no step leaves anything that changes the next."""
    ids = []
    for seed in (0, 0, 1):
        stage = Stage(plan(seed=seed, batches=(16, 64)), lambda _: None, FixedTimer())
        small, large = (stage.timed(batch).call for batch in (16, 64))
        first = small()
        large()
        assert small().equal(first)
        ids.append(large())
    assert ids[0].equal(ids[1])
    assert not ids[0].equal(ids[2])
    assert len(ids[0].unique()) > 1


def test_logits_are_finite_at_the_size_of_a_models(monkeypatch: pytest.MonkeyPatch):
    stage = Stage(plan(), lambda _: None, FixedTimer())
    logits = stage.model(step_batch(2, 1, 100, ARCH.vocab, CPU), stage.cache)
    assert logits.shape == (2, ARCH.vocab)
    assert 0.3 < logits.std().item() < 3.0


def test_pages_of_a_batch_are_its_own():
    batch = step_batch(5, 1, 130, 1000, CPU)
    assert batch.page_table.shape == (5, 3)
    assert batch.page_table.unique().numel() == 15
    assert batch.slots.tolist() == [int(page) * 64 + 1 for page in batch.page_table[:, 2]]
    assert batch.positions.tolist() == [129] * 5
    assert batch.token_ids.unique().numel() == 5


def test_a_chunk_of_a_prompt():
    """Thirty tokens behind seventy, of each of two sequences; the head sees their last ones."""
    (row,) = rows(plan(query_len=30))
    assert row.tokens_per_s == pytest.approx(30 * 4000)
    assert row.link_bytes["all_gather"] == 7 * 2 * ARCH.hidden * 4
    assert row.link_bytes["combine"] == 5 * 7 * 2 * 30 * ARCH.hidden * 4
    batch = step_batch(2, 30, 100, ARCH.vocab, CPU)
    assert batch.positions.tolist() == list(range(70, 100)) * 2
    assert batch.query_start.tolist() == [0, 30, 60]
    assert batch.logit_rows.tolist() == [29, 59]
    pages = batch.page_table[:, 1].tolist()
    assert batch.slots.tolist() == [page * 64 + place for page in pages for place in range(6, 36)]


def test_a_stage_of_a_pipeline():
    """The first sees no logits, the last no token ids; each has its half of the layers."""
    first, last = (rows(plan(ranks=replace(EIGHT, pp=2, rank=rank)))[0] for rank in (0, 8))
    assert (first.num_layers, last.num_layers) == (3, 3)
    assert ("head", "router") not in {(op.part, op.op) for op in first.ops}
    assert ("dense", "linear") not in {(op.part, op.op) for op in last.ops}
    assert "receive" not in first.link_bytes
    assert last.link_bytes["receive"] == 2 * ARCH.hidden * 4
    assert [(op.part, op.op) for op in first.ops if op.limit_us and op.us is None] == []


def launches(*names: str) -> list[tuple[str, float]]:
    return [(name, 1.0) for name in names]


def test_launches_are_cut_at_the_marks():
    seen = launches(
        "before", "x erfinv y", "a", "b", "x erfinv y", "x erfinv y", "c", "erfinv", "z"
    )
    pieces = stretches(seen)
    assert pieces == [launches("a", "b"), [], launches("c")]
    found = spent([("p", "f"), ("p", OTHER), ("p", "f")], pieces)
    assert found == {("p", "f"): Spent(3.0, 3), ("p", OTHER): Spent(0.0, 0)}


def test_a_lost_mark_is_noticed():
    """Else every later launch would be counted as its neighbour's."""
    assert spent([("p", "f"), ("p", "g")], stretches(launches("erfinv", "a", "erfinv"))) is None


def test_a_disturbed_step_is_told():
    class Uneven(FixedTimer):
        def time(self, calls: Any, budget_s: float) -> CallTime:
            return super().time(calls, budget_s).model_copy(update={"p10_us": 2e3, "p90_us": 8e3})

    (row,) = run(plan(batches=(8,)), lambda _: None, Uneven())
    assert [note for note in row.notes if "differ 4 fold" in note]
    assert not rows(plan(batches=(8,)))[0].notes


class FakeProfiler:
    """Lists what was launched while it was on, as the GPU's does."""

    launched: ClassVar[list[str]] = []

    def __init__(self, **_options: Any) -> None:
        self.launched.clear()

    def __enter__(self) -> FakeProfiler:
        return self

    def __exit__(self, *_error: object) -> None:
        """Nothing to end."""

    def events(self) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(
                name=name,
                device_type=SimpleNamespace(name="CUDA"),
                time_range=SimpleNamespace(start=2.0 * place, elapsed_us=lambda: 2.0),
            )
            for place, name in enumerate(self.launched)
        ]


def test_a_gpus_launches_belong_to_what_ran_around_them(monkeypatch: pytest.MonkeyPatch):
    """Every op launches one kernel here, the sampler two; marks count nowhere."""
    monkeypatch.setattr(kernels_breakdown, "profile", FakeProfiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    launched = FakeProfiler.launched
    monkeypatch.setattr(torch, "erfinv", lambda _x, out: launched.append("an erfinv kernel"))
    trace = Trace(CPU)
    trace.device = SimpleNamespace(type="cuda")  # type: ignore[assignment]
    plain = resolve_ops("cpu")
    ops = trace.wrapped(
        replace(
            plain,
            linear=replace(plain.linear, run=lambda *_: launched.append("gemm")),
            sample=replace(plain.sample, run=lambda *_: launched.extend(["max", "pick"])),
        )
    )

    def part() -> None:
        launched.append("bmm")
        ops.linear()
        ops.linear()

    def step() -> None:
        owner.part()
        launched.append("add")
        ops.sample()

    owner = SimpleNamespace(part=part)
    trace._cover(owner, "part", "attention")
    found = trace.measure(step)
    assert found == {
        (REST, OTHER): Spent(2.0, 1, 0),
        ("attention", OTHER): Spent(2.0, 1, 0),
        ("attention", "linear"): Spent(4.0, 2, 2),
        (REST, "sample"): Spent(4.0, 2, 1),
    }
    assert ops.linear() is None
    assert launched[-1] == "gemm"


def test_without_times_there_are_still_limits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Trace, "measure", lambda self, step: None)
    (row,) = rows(plan())
    assert row.ops_us is None
    assert sum(op.limit_us for op in row.ops) == pytest.approx(row.limit_us)
    assert "the profiler lost launches" in row.notes[0]


def test_an_op_is_compared_with_its_limit():
    calls = (
        OpCall("moe", "experts", "", flops=1e6, bytes=8e6, count=3),
        OpCall("moe", "linear", "", flops=1e6, bytes=1e6, count=3),
    )
    found = op_shares(calls, {("moe", "experts"): Spent(12.0, 6, 3)}, Rates(4.0, 1000.0, 1.0))
    assert found[0] == OpShare(
        part="moe", op="experts", calls=3, launches=6, us=12.0, flops=3e6, bytes=24e6, limit_us=6.0
    )
    assert found[0].share == 0.5
    assert (found[1].us, found[1].share, found[1].limit_us) == (None, None, 0.75)


def test_memory_that_does_not_hold_the_rank_is_a_sentence(monkeypatch: pytest.MonkeyPatch):
    def full(*_arguments: object) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(rank, "_model", full)
    with pytest.raises(ConfigError, match="--num-layers below 6"):
        rows(plan())


def test_a_batch_too_large_for_memory_does_not_cost_the_others(monkeypatch: pytest.MonkeyPatch):
    timed = Stage.timed

    def small_ones(stage: Stage, batch: int) -> Any:
        if batch > 16:
            raise torch.OutOfMemoryError("full")
        return timed(stage, batch)

    monkeypatch.setattr(Stage, "timed", small_ones)
    records = run(plan(batches=(8, 16, 32)), lambda _: None, FixedTimer())
    assert [next(records).batch, next(records).batch] == [8, 16]
    with pytest.raises(ConfigError, match="a smaller --batch"):
        next(records)


def test_a_short_model_keeps_a_layer_with_experts():
    assert ARCH.first_layers(3).indexer.full_layers == (0, 1)
    assert ARCH.first_layers(100) is ARCH
    with pytest.raises(ConfigError, match="2 is the fewest with experts"):
        ARCH.first_layers(1)


@pytest.mark.gpu
def test_a_rank_on_a_gpu():
    device = torch.device("cuda")
    wide = replace(
        ARCH, hidden=1024, moe=replace(ARCH.moe, intermediate=512, shared_intermediate=512)
    )
    asked = plan(arch=wide, device=device, dtype=torch.bfloat16, batches=(16, 64), context=256)
    for row in run(asked, lambda _: None, timer_for(device)):
        assert row.step.method in ("graph", "events"), row.step.note
        assert row.ops_us is not None, row.notes
        assert 0 < row.ops_us < 3 * row.step.median_us
        seen = {(op.part, op.op): op for op in row.ops}
        for label in (("moe", "experts"), ("attention", "mla"), ("attention", "linear")):
            assert seen[label].us
            assert seen[label].launches >= seen[label].calls
        if row.step.launches is not None:
            seen_launches = sum(op.launches for op in row.ops)
            assert seen_launches == pytest.approx(row.step.launches, rel=0.05)
