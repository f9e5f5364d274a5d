"""Launching a step asks nothing of the device: no number is read back, no copy is waited for."""

from __future__ import annotations

import dataclasses
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.engine.fakes import as_decodes
from tests.factories import tiny_glm_folder
from tetrad.core.arch import ModelArch
from tetrad.core.plan import StepPlan
from tetrad.core.request import SamplingParams
from tetrad.core.step import SampleWork, SequenceWork
from tetrad.engine.grammars import Masks
from tetrad.engine.runner import Runner
from tetrad.kernels.device import waiting_is_an_error
from tetrad.kernels.finite_rows import reference as finite_rows_reference
from tetrad.kernels.sample import reference
from tetrad.kernels.select import OpSet, resolve_ops
from tetrad.layers.cache import KvCache
from tetrad.models.loader import load_model

READS = {
    *("item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "unique", "bincount"),
    *("__bool__", "__int__", "__float__", "__index__", "is_nonzero", "equal", "allclose"),
}
"""Functions of torch whose result, or its shape, is known only when the device has computed it."""


class NoReads(TorchFunctionMode):
    """Refuses them, and indexing by a list or by a mask."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        assert name not in READS, f"{name} waits for the device"
        if name in ("__getitem__", "__setitem__"):
            for part in args[1] if isinstance(args[1], tuple) else (args[1],):
                assert not isinstance(part, list), (
                    "an index that is a list is copied and waited for"
                )
                is_mask = isinstance(part, Tensor) and part.dtype == torch.bool
                assert not is_mask, "an index that is a mask is counted first"
        return func(*args, **(kwargs or {}))


def without_waiting_ops(ops: OpSet) -> OpSet:
    """Plain torch's attention, index scores and experts read lengths on the host, and so do a CPU's
    own ways to sample and to find numbers that are not finite; here others stand in for them, as
    what is tried is everything around."""

    def mla(queries: Tensor, pool: Tensor, *args: Any) -> Tensor:
        return queries[..., : args[-1]].contiguous()

    def index_score(queries: Tensor, weights: Tensor, pool: Tensor, ragged: Any) -> Tensor:
        return weights.new_zeros(len(queries), ragged.max_kv_len)

    def experts(x: Tensor, weight: Any, ids: Tensor, weights: Tensor, *added: Tensor) -> Tensor:
        return x * weights.sum(1, keepdim=True).to(x.dtype) + added[0] + added[1]

    stand_ins = {"mla": mla, "index_score": index_score, "experts": experts}
    waiting = {n: run for n, run in stand_ins.items() if getattr(ops, n).name == "torch"}
    if ops.sample.name == "candidates":
        waiting["sample"] = reference.run
    if ops.finite_rows.name == "total":
        waiting["finite_rows"] = finite_rows_reference.run
    replaced = {n: dataclasses.replace(getattr(ops, n), run=run) for n, run in waiting.items()}
    return dataclasses.replace(ops, **replaced)


def make_runner(folder: Path, device: str, dtype: torch.dtype) -> Runner:
    ops = without_waiting_ops(resolve_ops(device, dtype=dtype))
    model = load_model(tiny_glm_folder(folder), device=device, dtype=dtype, ops=ops)
    cache = KvCache(ModelArch.from_folder(folder), 16, device, dtype)
    return Runner(model, cache, ops, torch.device(device))


def work(rid: str, num_tokens: int, start: int, page: int, **params: Any) -> SequenceWork:
    history = tuple(range(start))
    sample = SampleWork(SamplingParams(**params), 5, 3, history, 1, (1,))
    return SequenceWork(rid, array("i", (3,)) * num_tokens, start, (page, page + 1), sample)


RULES = {"top_p": 0.9, "num_logprobs": 3, "repetition_penalty": 1.2, "logit_bias": {4: 1.0}}
COLUMNS = as_decodes((work("a", 1, 70, 0, temperature=0.0), work("b", 1, 5, 2, top_p=0.9)))
PLANS = {
    "columns": StepPlan((), COLUMNS),
    "columns and a chunk": StepPlan((work("c", 33, 20, 4, **RULES),), COLUMNS),
    "decode": StepPlan((work("a", 1, 70, 0, temperature=0.0), work("b", 1, 5, 2, **RULES))),
    "greedy decode": StepPlan((work("a", 1, 70, 0, temperature=0.0),)),
    "prompts": StepPlan((work("a", 9, 0, 0), work("b", 100, 0, 2, **RULES))),
    "mixed": StepPlan((work("a", 1, 70, 0), work("b", 33, 20, 2), work("c", 1, 3, 4, **RULES))),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_step_reads_nothing_back(tmp_path: Path, name: str):
    runner = make_runner(tmp_path, "cpu", torch.float32)
    with NoReads():
        launched = runner.launch(PLANS[name])
    assert len(launched.wait().token_ids) == PLANS[name].num_rows


def masks_of(plan: StepPlan) -> Masks:
    """Every second token of the vocabulary, in each row."""
    num_rows = plan.num_rows
    words = memoryview(bytearray(b"\x55" * (num_rows * 4096))).cast("i")
    return Masks(tuple(range(num_rows)), words, ((0, 1),))


@pytest.mark.parametrize("name", PLANS)
def test_a_masked_step_reads_nothing_back(tmp_path: Path, name: str):
    runner = make_runner(tmp_path, "cpu", torch.float32)
    with NoReads():
        launched = runner.launch(PLANS[name], lambda: masks_of(PLANS[name]))
    tokens = launched.wait().token_ids.tolist()
    assert all(token % 2 == 0 or (row, token) == (0, 1) for row, token in enumerate(tokens))


@pytest.mark.parametrize("index", [[0], torch.tensor([True])])
def test_the_guard_sees_what_waits(index: Any):
    values = torch.ones(1)
    with NoReads(), pytest.raises(AssertionError, match=r"waited for|counted first"):
        values[index]
    for read in (Tensor.tolist, Tensor.item, bool, Tensor.cpu, Tensor.nonzero):
        with NoReads(), pytest.raises(AssertionError, match="waits"):
            read(values)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PLANS)
def test_a_step_does_not_wait_for_the_gpu(tmp_path: Path, name: str):
    runner = make_runner(tmp_path, "cuda", torch.bfloat16)
    for masks in (None, lambda: masks_of(PLANS[name])):
        runner.launch(PLANS[name], masks).wait()
        with waiting_is_an_error():
            launched = runner.launch(PLANS[name], masks)
    assert len(launched.wait().token_ids) == PLANS[name].num_rows
