"""Recorded decode steps: what is recorded, which step runs from which, and that it is the same."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tests.engine.fakes import as_decodes
from tests.factories import tiny_glm_folder
from tetrad.core.arch import ModelArch
from tetrad.core.plan import StepPlan
from tetrad.core.request import SamplingParams
from tetrad.core.step import PAGE_TOKENS, SampleWork, SequenceWork
from tetrad.engine.graphs import (
    CannotRecordError,
    DecodeGraphs,
    GraphPlan,
    thinned,
    usual_sizes,
)
from tetrad.engine.runner import Runner
from tetrad.kernels.index_score import reference as score_reference
from tetrad.kernels.mla import reference as mla_reference
from tetrad.kernels.ragged import Ragged
from tetrad.kernels.select import OpSet, resolve_ops
from tetrad.layers.batch import ForwardBatch
from tetrad.layers.cache import KvCache
from tetrad.models.loader import load_model

CPU = torch.device("cpu")
SCRATCH = 12
VOCAB = 50


@dataclass
class FakeRecorder:
    """Runs the step again where a GPU would replay it. Each graph costs what `costs` says."""

    total_bytes: int = 1000
    first_bytes: int = 0
    each_bytes: int = 0
    largest: int = 10**9
    error: str = ""
    num_recorded: int = 0
    sizes: list[int] = field(default_factory=list)

    def record(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        if self.error:
            raise CannotRecordError(self.error)
        result = step()
        if len(result) > self.largest:
            raise torch.OutOfMemoryError("no")
        self.num_recorded += 1
        self.sizes.append(len(result))

        def replay() -> None:
            result.copy_(step())

        return replay, result

    def free_bytes(self) -> int:
        first = self.first_bytes if self.num_recorded else 0
        return self.total_bytes - first - self.each_bytes * max(0, self.num_recorded - 1)


class FakeModel:
    """Writes each token to its slot; a row's logits depend on all that it reads, and on no more."""

    def __init__(self) -> None:
        self.slots = torch.full(((SCRATCH + 1) * PAGE_TOKENS,), -1, dtype=torch.int64)
        self.batches: list[ForwardBatch] = []

    def __call__(self, batch: ForwardBatch, cache: Any) -> Tensor:
        self.batches.append(batch)
        self.slots[batch.slots] = batch.token_ids
        rows = []
        ends = batch.query_start[1:].tolist()
        for row in batch.logit_rows.tolist():
            sequence = next(s for s, end in enumerate(ends) if row < end)
            seen = int(batch.kv_lens[sequence]) - (ends[sequence] - 1 - row)
            at = torch.arange(seen)
            pages = batch.page_table[sequence][at // PAGE_TOKENS].long()
            past = self.slots[pages * PAGE_TOKENS + at % PAGE_TOKENS]
            assert (past >= 0).all(), "a slot is read that nobody wrote"
            assert int(batch.positions[row]) == seen - 1
            weight = (at + 3) * (past + 7)
            rows.append(torch.sin(weight.sum() * torch.arange(1, VOCAB + 1).double()).float())
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)


def make_runner(plan: GraphPlan | None, recorder: FakeRecorder | None = None) -> Runner:
    runner = Runner(FakeModel(), None, resolve_ops("cpu"), CPU)  # type: ignore[arg-type]
    if plan is not None:
        runner.record_graphs(plan, recorder or FakeRecorder(), lambda _: None)
        model_of(runner).batches.clear()
    return runner


def model_of(runner: Runner) -> FakeModel:
    assert isinstance(runner.model, FakeModel)
    return runner.model


def work(rid: str, start: int, pages: tuple[int, ...], *ids: int, samples: bool = True):
    sample = SampleWork(SamplingParams(temperature=0.8), 4, start) if samples else None
    return SequenceWork(rid, array("i", ids), start, pages, sample)


def tokens_of(runner: Runner, plan: StepPlan) -> list[int]:
    token_ids: list[int] = runner.launch(plan).wait().token_ids.tolist()
    return token_ids


PLAN = GraphPlan((1, 2, 4), short_tokens=70, context_tokens=200, scratch_page=SCRATCH)
PROMPTS = StepPlan(
    (work("a", 0, (3, 1), *range(9)), work("b", 0, (5, 6), *range(69)), work("c", 0, (9,), 8))
)
DECODES = [
    StepPlan((work("a", 9, (3, 1), -1), work("b", 69, (5, 6), -2), work("c", 1, (9,), 4))),
    StepPlan((work("c", 2, (9,), -3), work("a", 10, (3, 1), -1))),
    StepPlan((work("b", 70, (5, 6), 11), work("c", 3, (9,), -1), work("a", 11, (3, 1), -2))),
    StepPlan((work("a", 12, (3, 1), -3),)),
]


def test_a_replay_gives_the_tokens_of_a_step_without_a_graph():
    with_graphs, without = make_runner(PLAN), make_runner(None)
    for plan in (PROMPTS, *DECODES):
        assert tokens_of(with_graphs, plan) == tokens_of(without, plan)
    sizes = [
        (len(batch.kv_lens), max(batch.kv_lens_host)) for batch in model_of(with_graphs).batches
    ]
    assert sizes == [(3, 69), (4, 70), (2, 70), (4, 200), (1, 70)]
    scratch = slice(SCRATCH * PAGE_TOKENS, None)
    written, expected = (model_of(r).slots[: scratch.start] for r in (with_graphs, without))
    assert torch.equal(written, expected)


@pytest.mark.parametrize("num_works", [0, 1])
def test_columns_are_replayed_as_structs_are(num_works: int):
    """Those of the last rows of a step stay structs."""
    ours, theirs = make_runner(PLAN), make_runner(PLAN)
    assert tokens_of(ours, PROMPTS) == tokens_of(theirs, PROMPTS)
    for plan in DECODES[:3]:
        count = len(plan.sequences) - num_works
        columns = StepPlan(plan.sequences[count:], as_decodes(plan.sequences[:count]))
        assert tokens_of(ours, columns) == tokens_of(theirs, plan)
        tables = [model_of(runner).batches[-1].page_table for runner in (ours, theirs)]
        assert tables[0].equal(tables[1])


def test_padding_gets_no_expert_and_is_written_to_the_scratch_page():
    runner = make_runner(PLAN)
    for plan in (PROMPTS, DECODES[0]):
        runner.launch(plan)
    batch = model_of(runner).batches[-1]
    assert batch.is_padding is not None
    assert batch.is_padding.flatten().tolist() == [False, False, False, True]
    assert batch.slots[3] == SCRATCH * PAGE_TOKENS
    assert batch.kv_lens[3] == 1
    assert batch.page_table[3, 0] == SCRATCH


@pytest.mark.parametrize(
    "works",
    [
        (work("a", 9, (3, 1), 5, 6),),
        (work("a", 9, (3, 1), 5, samples=False),),
        tuple(work(f"{i}", 0, (i,), 5) for i in range(5)),
    ],
)
def test_what_is_no_decode_or_too_large_runs_without_a_graph(
    works: tuple[SequenceWork, ...], caplog: pytest.LogCaptureFixture
):
    runner = make_runner(PLAN)
    model_of(runner).slots.fill_(1)
    for _ in range(2):
        runner.launch(StepPlan(works))
    assert all(batch.num_real is None for batch in model_of(runner).batches)
    assert len(caplog.records) == (len(works) == 5)


def test_what_is_recorded_anew_is_the_same():
    runner, other = make_runner(PLAN), make_runner(None)
    for plan in (PROMPTS, *DECODES[:2]):
        assert tokens_of(runner, plan) == tokens_of(other, plan)
    runner.renew_graphs()
    model_of(runner).batches.clear()
    for plan in DECODES[2:]:
        assert tokens_of(runner, plan) == tokens_of(other, plan)
    assert all(batch.num_real is not None for batch in model_of(runner).batches)


def graphs_of(plan: GraphPlan, recorder: FakeRecorder) -> DecodeGraphs:
    graphs = make_runner(plan, recorder).graphs
    assert graphs is not None
    return graphs


def test_the_largest_comes_first():
    recorder = FakeRecorder()
    assert graphs_of(PLAN, recorder).sizes == {"short": [1, 2, 4], "sparse": [1, 2, 4]}
    assert recorder.sizes == [4, 4, 2, 2, 1, 1]


def test_a_context_that_is_always_read_whole_needs_one_set():
    plan = GraphPlan((1, 2), short_tokens=70, context_tokens=70, scratch_page=SCRATCH)
    assert graphs_of(plan, FakeRecorder()).sizes == {"short": [1, 2]}


def test_the_list_is_cut_to_the_memory():
    sizes = tuple(range(1, 13))
    plan = GraphPlan(sizes, 70, 70, SCRATCH, reserved_bytes=300)
    recorder = FakeRecorder(total_bytes=1000, first_bytes=200, each_bytes=100)
    graphs = graphs_of(plan, recorder)
    assert graphs.sizes == {"short": [1, 4, 7, 10, 11, 12]}
    assert recorder.free_bytes() >= 300
    assert graphs.num_bytes == 1000 - recorder.free_bytes()


def test_a_size_that_does_not_fit_is_left_out(caplog: pytest.LogCaptureFixture):
    graphs = graphs_of(PLAN, FakeRecorder(largest=2))
    assert graphs.sizes == {"short": [1, 2], "sparse": [1, 2]}
    assert "Decode steps of 4 run without a graph: memory ends there." in caplog.text


def test_a_step_that_cannot_be_recorded_runs_and_says_why_once(caplog: pytest.LogCaptureFixture):
    runner = make_runner(PLAN, FakeRecorder(error="it waits."))
    other = make_runner(None)
    for plan in (PROMPTS, *DECODES):
        assert tokens_of(runner, plan) == tokens_of(other, plan)
    with caplog.at_level(logging.WARNING):
        assert [r.message for r in caplog.records] == [
            "Decode steps run without CUDA graphs: it waits."
        ]


def reading_lengths_on_the_device(ops: OpSet) -> OpSet:
    """Plain torch's attention takes lengths from the host, where a recorded step has limits. Here
    they come from the tensors, as a GPU's kernels take them."""

    def real(ragged: Ragged) -> Ragged:
        lens = tuple(ragged.kv_lens.tolist())
        return dataclasses.replace(ragged, kv_lens_host=lens)

    def mla(queries: Tensor, pool: Tensor, ragged: Ragged, *args: Any) -> Tensor:
        return mla_reference.run(queries, pool, real(ragged), *args)

    def index_score(queries: Tensor, weights: Tensor, pool: Tensor, ragged: Ragged) -> Tensor:
        scores = score_reference.run(queries, weights, pool, real(ragged))
        missing = ragged.max_kv_len - scores.shape[1]
        return torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)

    return dataclasses.replace(
        ops,
        mla=dataclasses.replace(ops.mla, run=mla),
        index_score=dataclasses.replace(ops.index_score, run=index_score),
    )


def test_a_real_model_gives_the_same_with_padding_and_without(tmp_path: Path):
    """Contexts below and above top-k, every unwritten slot NaN."""
    folder = tiny_glm_folder(tmp_path)
    arch = ModelArch.from_folder(folder)
    ops = reading_lengths_on_the_device(resolve_ops("cpu"))
    model = load_model(folder, device="cpu", dtype=torch.float32, ops=ops)
    ours, theirs = (
        Runner(model, KvCache(arch, SCRATCH + 1, CPU, torch.float32), ops, CPU) for _ in range(2)
    )
    plan = GraphPlan((1, 4), arch.indexer.topk, 200, SCRATCH)
    for runner in (ours, theirs):
        runner.cache.poison()
    ours.record_graphs(plan, FakeRecorder(), lambda _: None)
    for step in (PROMPTS, *DECODES):
        tokens = tokens_of(ours, step)
        assert tokens == tokens_of(theirs, step)
        assert min(tokens) >= 0


class TestSizes:
    USUAL: ClassVar = {
        1: (1,),
        6: (1, 2, 3, 4, 6),
        33: (1, 2, 3, 4, 8, 16, 24, 32, 33),
    }

    @pytest.mark.parametrize("most", USUAL)
    def test_usual_sizes(self, most: int):
        assert usual_sizes(most) == self.USUAL[most]

    def test_large_sizes_are_few(self):
        sizes = usual_sizes(2048)
        assert len(sizes) < 90
        assert sizes[-1] == 2048
        assert all(b - a <= max(1, b // 16 + 7) for a, b in itertools.pairwise(sizes))

    @pytest.mark.parametrize(
        ("count", "kept"),
        [(9, [1, 2, 3, 4, 5]), (3, [1, 3, 5]), (2, [1, 5]), (1, [1]), (0, []), (-4, [])],
    )
    def test_thinned(self, count: int, kept: list[int]):
        assert thinned([1, 2, 3, 4, 5], count) == kept
