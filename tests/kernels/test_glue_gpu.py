"""The small Triton kernels on a GPU: real sizes, repeats, graphs, dirty memory, no waiting."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.dirt import dirty_memory
from tests.kernels.glue import GLUE_OPS, fp8_latents, glm_case, sampling_inputs
from tetrad.core.keys import ACTIVATION
from tetrad.formats import fp8_keys
from tetrad.kernels.backend import Backend, Op
from tetrad.kernels.canary import try_case
from tetrad.kernels.compare import compare
from tetrad.kernels.contract import Case, case
from tetrad.kernels.device import waiting_is_an_error
from tetrad.kernels.registry import OPS
from tetrad.kernels.timer import CudaTimer

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
NUM_TOKENS = (1, 33, 2048)
NUM_SAMPLED = (1, 33, 128)


def inputs_of(op: Op, case: Case) -> dict[str, Any]:
    return op.check.inputs(case, torch.bfloat16, GPU)


def outputs_of(op: Op, backend: Backend, inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    return tuple(out.clone() for out in op.check.outputs(backend.run(**inputs)))


def same_bits(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("name", [name for name in GLUE_OPS if name not in ("route", "sample")])
def test_real_sizes_give_what_the_reference_gives(name: str, num_tokens: int):
    op = OPS[name]
    inputs = inputs_of(op, glm_case(name, num_tokens))
    expected = outputs_of(op, op.backends["torch"], inputs)
    dirty_memory()
    found = outputs_of(op, op.backends["triton"], inputs)
    for ours, reference in zip(found, expected, strict=True):
        assert compare(ours, reference).passes(op.contract.tolerance["bfloat16"])


@pytest.mark.parametrize("num_groups", [1, 8])
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_real_sizes_of_routing(num_tokens: int, num_groups: int):
    """Experts that tie to the last bit may swap, which changes a token's sum; nothing else may."""
    op = OPS["route"]
    inputs = inputs_of(op, glm_case("route", num_tokens))
    inputs |= {"num_groups": num_groups, "groups_per_token": max(1, num_groups // 2)}
    weights, ids = op.backends["triton"].run(**inputs)
    expected, expected_ids = op.backends["torch"].run(**inputs)
    choice = inputs["logits"].sigmoid() + inputs["bias"]
    differs = ids != expected_ids
    assert int(differs.sum()) <= num_tokens // 100
    gap = choice.gather(1, ids) - choice.gather(1, expected_ids)
    assert float(gap.abs().max()) < 1e-6
    is_same = ~differs.any(dim=1)
    assert compare(weights[is_same], expected[is_same]).passes(1e-6)
    assert all(len(set(row)) == 8 for row in ids.tolist())


@pytest.mark.parametrize("seed", range(1, 8))
@pytest.mark.parametrize("rows", NUM_SAMPLED)
def test_real_sizes_of_sampling(rows: int, seed: int):
    """Sums of 154880 numbers in another order move a token's border by less than 1e-5."""
    arguments = [argument.to(GPU) for argument in sampling_inputs(seed, rows, 154880)]
    sample = OPS["sample"].backends
    found, expected = sample["triton"](*arguments), sample["torch"](*arguments)
    others = (found != expected).nonzero().flatten().tolist()
    for row in others:
        nudged = [argument[row : row + 1] for argument in arguments]
        *rules, uniform = nudged
        near = {int(sample["torch"](*rules, uniform + shift)) for shift in (-1e-5, 0.0, 1e-5)}
        low, high = min(near), max(near)
        assert low <= int(found[row]) <= high, (row, int(found[row]), near)
    assert len(others) <= 1 + rows // 20


@pytest.mark.parametrize("rows", NUM_SAMPLED)
def test_real_sizes_of_greedy_choice(rows: int):
    """Many tie; the lowest id counts."""
    logits = torch.randn(rows, 154880, device=GPU).mul(2).round()
    is_best = logits == logits.max(dim=1, keepdim=True).values
    token = torch.arange(154880, device=GPU)
    expected = torch.where(is_best, token, 154880).min(dim=1).values
    assert torch.equal(OPS["sample"].backends["triton"](logits, None), expected)


@pytest.mark.parametrize("name", GLUE_OPS)
def test_a_hundred_runs_give_the_same_bits(name: str):
    op = OPS[name]
    inputs = inputs_of(op, glm_case(name, 129))
    if name == "sample":
        values = [argument.to(GPU) for argument in sampling_inputs(1, 64, 154880)]
        inputs = dict(zip(inputs, values, strict=True))
    first = outputs_of(op, op.backends["triton"], inputs)
    for _ in range(100):
        dirty_memory()
        assert same_bits(outputs_of(op, op.backends["triton"], inputs), first)


def test_a_sampled_row_does_not_depend_on_its_batch():
    arguments = [argument.to(GPU) for argument in sampling_inputs(2, 40, 154880)]
    sample = OPS["sample"].backends["triton"]
    together = sample(*arguments)
    alone = [sample(*(argument[row : row + 1] for argument in arguments)) for row in range(40)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("num_tokens", [256, 1024, 2048])
def test_a_token_s_sum_does_not_depend_on_its_batch(num_tokens: int):
    op = OPS["reduce_experts"]
    inputs = inputs_of(op, glm_case("reduce_experts", num_tokens))
    rows = inputs["rows"].view(num_tokens, 8, -1)
    few = {name: inputs[name][:40] for name in ("ids", "slot_weights", "shared", "residual")}
    alone = op.backends["triton"].run(rows=rows[:40].flatten(0, 1), **few)
    together = op.backends["triton"].run(**inputs)[:40]
    assert torch.equal(together, alone)


@pytest.mark.parametrize("num_tokens", [1, 33])
@pytest.mark.parametrize("name", GLUE_OPS)
def test_a_graph_replays_with_other_inputs(name: str, num_tokens: int):
    op = OPS[name]
    backend = op.backends["triton"]
    first = inputs_of(op, glm_case(name, num_tokens))
    second = inputs_of(op, renamed(glm_case(name, num_tokens)))
    static = {key: _copy(value) for key, value in first.items()}
    expected = [outputs_of(op, backend, {k: _copy(v) for k, v in given.items()})
                for given in (first, second)]  # fmt: skip
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = op.check.outputs(backend.run(**static))
    for given, wanted in zip((first, second), expected, strict=True):
        for key, value in given.items():
            if isinstance(value, Tensor):
                static[key].copy_(value)
        graph.replay()
        assert same_bits(tuple(captured), wanted)


def renamed(case: Case) -> Case:
    """The same shape with other numbers."""
    return Case(f"{case.name} again", case.values)


def _copy(value: Any) -> Any:
    """A copy with the same strides."""
    if not isinstance(value, Tensor):
        return value
    size = sum(
        (length - 1) * step for length, step in zip(value.shape, value.stride(), strict=True)
    )
    room = value.new_empty(size + 1).as_strided(value.shape, value.stride())
    return room.copy_(value)


@pytest.mark.parametrize("name", GLUE_OPS)
def test_the_host_never_waits(name: str):
    op = OPS[name]
    inputs = inputs_of(op, glm_case(name, 33))
    op.backends["triton"].run(**inputs)
    with waiting_is_an_error():
        op.backends["triton"].run(**inputs)


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_fp8_keys_are_those_of_the_reference(num_tokens: int):
    """Numbers that lie between two codes may become either; what is not finite shows."""
    op = OPS["latents"]
    case = fp8_latents(num_tokens)
    inputs = inputs_of(op, case)
    for result in try_case(op, op.backends["triton"], case, torch.bfloat16, GPU):
        assert result.passes(op.contract.tolerance["bfloat16"]), result
    inputs["index_key"][0, 100] = torch.nan
    results = op.backends["triton"].run(**inputs)
    first = tuple(result.clone() for result in results)
    keys = fp8_keys.decode_index_keys(results[2], inputs["slots"])
    assert keys[0].isnan().all()
    assert keys[1:].isfinite().all()
    dirty_memory()
    assert same_bits(op.backends["triton"].run(**inputs), first)


def num_written(pool: Tensor) -> int:
    """Pages that are not all zero, without a copy of a pool that fills a tenth of the GPU."""
    return int(pool.flatten(1).any(1).count_nonzero())


def test_fp8_pools_past_two_to_the_31_bytes():
    op = OPS["latents"]
    inputs = inputs_of(op, fp8_latents(2))
    num_pages = (1 << 31) // (64 * 132) + 2
    near = torch.tensor([127, 3], device=GPU)
    far = torch.tensor([num_pages * 64 - 1, 3], device=GPU)
    pools = {
        name: torch.zeros(num_pages, *inputs[name].shape[1:], dtype=torch.uint8, device=GPU)
        for name in ("pool", "index_pool")
    }
    small = {name: torch.zeros_like(inputs[name]) for name in pools}
    _, pool, index_pool = op.backends["triton"].run(**inputs | {"slots": near} | small)
    _, far_pool, far_index_pool = op.backends["triton"].run(**inputs | {"slots": far} | pools)
    assert torch.equal(far_pool.flatten(0, 1)[far], pool.flatten(0, 1)[near])
    found = fp8_keys.decode_index_keys(far_index_pool, far)
    assert torch.equal(found, fp8_keys.decode_index_keys(index_pool, near))
    assert num_written(far_pool) == 2
    assert num_written(far_index_pool) == 2


@pytest.mark.parametrize(("rank", "rotary", "index"), [(512, 64, 0), (16, 8, 128)])
def test_pools_past_two_to_the_31_elements(rank: int, rotary: int, index: int):
    """Offsets would wrap with 32 bits, into the pool of latents or into that of index keys."""
    op = OPS["latents"]
    num_pages = (1 << 31) // (64 * max(rank + rotary, index)) + 2
    sizes = {"Q": 64, "C": rank, "R": rotary, "I": index, "interleaved": True, "joined": True}
    inputs = inputs_of(op, case("far", T=2, P=2, **sizes, keys=ACTIVATION))
    near = torch.tensor([127, 3], device=GPU)
    far = torch.tensor([num_pages * 64 - 1, 3], device=GPU)
    pools = {
        name: torch.zeros(num_pages, *inputs[name].shape[1:], dtype=torch.bfloat16, device=GPU)
        for name in (("pool", "index_pool") if index else ("pool",))
    }
    _, *expected = op.backends["torch"].run(**inputs | {"slots": near})
    _, *found = op.backends["triton"].run(**inputs | {"slots": far} | pools)
    for ours, reference in list(zip(found, expected, strict=True))[: len(pools)]:
        rows = ours.flatten(0, 1)[far]
        assert compare(rows, reference.flatten(0, 1)[near]).passes(4e-3)
        assert num_written(ours) == 2


@pytest.mark.parametrize("backend", ["triton", "cublas"])
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 33, 64, 65, 512, 8192])
@pytest.mark.parametrize("name", ["absorb", "head_linear"])
def test_heads_products_of_every_step_size(name: str, num_tokens: int, backend: str):
    """On dirty memory, always the same bits."""
    op = OPS[name]
    inputs = inputs_of(op, glm_case(name, num_tokens))
    reference = outputs_of(op, op.backends["torch"], inputs)
    first = outputs_of(op, op.backends[backend], inputs)
    for ours, wanted in zip(first, reference, strict=True):
        assert compare(ours, wanted).passes(op.contract.tolerance["bfloat16"])
    for _ in range(100 if num_tokens <= 64 else 5):
        dirty_memory()
        assert same_bits(outputs_of(op, op.backends[backend], inputs), first)


@pytest.mark.parametrize("num_tokens", [1, 8, 64, 512])
def test_heads_products_are_not_copied(num_tokens: int):
    """cuBLAS writes heads side by side: torch makes no copy of what it is given to write to.
    But it may split a sum over many rows, and add it up in one launch more."""
    is_small = num_tokens <= 64
    most = {
        ("head_linear", "triton"): 1,
        ("head_linear", "cublas"): 1,
        ("absorb", "triton"): 1 if is_small else 3,
        ("absorb", "cublas"): 2 if is_small else 3,
    }
    for (name, backend), launches in most.items():
        inputs = inputs_of(OPS[name], glm_case(name, num_tokens))
        call = partial(OPS[name].backends[backend].run, **inputs)
        found = CudaTimer(GPU).time([call], 0.05)
        assert found.method == "graph", found.note
        assert found.launches is not None
        assert found.launches <= launches, (name, backend)
