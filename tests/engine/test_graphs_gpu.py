"""Decode steps recorded and replayed on a GPU."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
import torch

from tests.engine.fakes import make_request
from tests.engine.test_no_waiting import make_runner
from tetrad.core.config import ServeConfig
from tetrad.core.plan import StepPlan
from tetrad.core.request import SamplingParams
from tetrad.core.step import SampleWork, SequenceWork
from tetrad.data import embedded_model
from tetrad.engine.cuda_graph import CudaRecorder
from tetrad.engine.engine import Engine
from tetrad.engine.graphs import GraphPlan
from tetrad.engine.load import load_engine
from tetrad.engine.runner import Runner

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
SCRATCH, CONTEXT, TOPK = 15, 128, 16


def work(rid: str, start: int, page: int, *ids: int) -> SequenceWork:
    sample = SampleWork(SamplingParams(temperature=0.8), 4, start)
    return SequenceWork(rid, array("i", ids), start, (page, page + 1), sample)


PROMPTS = StepPlan((work("a", 0, 0, *range(9)), work("b", 0, 2, *range(70)), work("c", 0, 4, 8)))
DECODES = [
    StepPlan((work("a", 9, 0, -1), work("b", 70, 2, -2), work("c", 1, 4, 4))),
    StepPlan((work("c", 2, 4, -3), work("a", 10, 0, -1))),
    StepPlan((work("b", 71, 2, 11), work("c", 3, 4, -1), work("a", 11, 0, -2))),
    StepPlan((work("a", 12, 0, -3),)),
]


def recorded(folder: Path, sizes: tuple[int, ...] = (1, 2, 4)) -> Runner:
    runner = make_runner(folder, "cuda", torch.bfloat16)
    runner.cache.poison()
    plan = GraphPlan(sizes, TOPK, CONTEXT, SCRATCH)
    graphs = runner.record_graphs(plan, CudaRecorder(GPU), lambda _: None)
    assert graphs.sizes == {"short": list(sizes), "sparse": list(sizes)}
    return runner


def test_a_replay_gives_the_bits_of_the_same_step_without_a_graph(tmp_path: Path):
    """Also with poisoned slots, other sizes in between, and whatever a graph left in the pool."""
    runner = recorded(tmp_path)
    assert runner.graphs is not None
    graphs = runner.graphs
    runner.launch(PROMPTS).wait()
    replayed = 0
    for plan in DECODES:
        graph = graphs._graph_for(plan)
        assert graph is not None
        replayed += 1
        runner.launch(plan).wait()
        with torch.inference_mode():
            graph.replay()
            ours = graph.logits.clone()
            theirs = runner.model(graph.inputs.batch(), runner.cache)
        assert torch.equal(ours, theirs)
        assert ours[: plan.num_rows].isfinite().all()
    assert replayed == len(DECODES)


def test_tokens_are_those_of_a_runner_without_graphs(tmp_path: Path):
    ours = recorded(tmp_path, (1, 2, 3))
    theirs = make_runner(tmp_path, "cuda", torch.bfloat16)
    theirs.cache.poison()
    for plan in (PROMPTS, *DECODES):
        tokens = ours.launch(plan).wait().token_ids.tolist()
        assert tokens == theirs.launch(plan).wait().token_ids.tolist()


@pytest.mark.alone
def test_graphs_share_their_memory(tmp_path: Path):
    """Many sizes cost little more than the largest alone."""
    runner = recorded(tmp_path, tuple(range(1, 40)))
    assert runner.graphs is not None
    assert runner.graphs.num_bytes < 1 << 30


def answers(engine: Engine) -> dict[str, list[int]]:
    told: dict[str, list[int]] = {}
    for number in range(9):
        prompt = [5 + (7 * i + number) % 90 for i in range(12 + 5 * number)]
        engine.add(make_request(f"{number}", prompt, 40, temperature=0.0, seed=number))
    while engine.has_work:
        for output in engine.step():
            told.setdefault(output.rid, []).extend(output.token_ids)
    return told


def test_the_embedded_model_answers_the_same_with_and_without_graphs():
    """Where the chosen backends can be recorded; where not, the engine says why and runs all the
    same. Rows are padded, so that a product may round otherwise: two requests may part ways."""
    config = {"model": embedded_model(), "device": "cuda", "max_running_requests": 9}
    engine = load_engine(ServeConfig(**config))  # type: ignore[arg-type]
    plain = load_engine(ServeConfig(**config, disable_cuda_graph=True))  # type: ignore[arg-type]
    assert plain.info["graph_sizes"] is None
    assert plain.info["activation_bytes"] > 0
    ours, theirs = answers(engine), answers(plain)
    assert sum(ours[rid] != theirs[rid] for rid in theirs) <= 2
    if not engine.info["graph_sizes"]["short"]:
        pytest.skip("the backends chosen here cannot be recorded")
    assert engine.info["graph_sizes"]["short"] == [1, 2, 3, 4, 8, 9]
