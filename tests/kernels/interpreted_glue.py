"""Run by test_glue_triton.py, in a process where Triton interprets kernels on the CPU.

In fp32 alone: the interpreter rounds bf16 wrongly.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.glue import GLUE_OPS, fp8_latents, sampling_inputs
from tetrad.formats import fp8_keys
from tetrad.kernels.canary import try_case
from tetrad.kernels.contract import Case
from tetrad.kernels.registry import OPS

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, id=f"{name}-{case.name}")
        for name in GLUE_OPS
        for case in OPS[name].contract.cases
    ],
)
def test_case(name: str, case: Case):
    op = OPS[name]
    for result in try_case(op, op.backends["triton"], case, torch.float32, CPU):
        assert result.passes(op.contract.tolerance["float32"]), result


def test_fp8_keys_of_glm():
    op = OPS["latents"]
    for result in try_case(op, op.backends["triton"], fp8_latents(33), torch.float32, CPU):
        assert result.passes(1e-4), result


def test_bytes_of_fp8_keys_are_those_of_the_reference():
    """Those of other slots too, and of what is not finite; but for a few codes next to these."""
    op = OPS["latents"]
    inputs = op.check.inputs(fp8_latents(20), torch.float32, CPU)
    inputs["key"][3, 5] = torch.nan
    inputs["index_key"][4, 100] = torch.nan
    ours, truth = (
        op.backends[name].run(**inputs | {n: inputs[n].clone() for n in ("pool", "index_pool")})
        for name in ("triton", "torch")
    )
    rows, expected = (pools[1].view(-1, 656) for pools in (ours, truth))
    different = rows[:, :528] != expected[:, :528]
    different[inputs["slots"][3]] = False
    assert different.sum() <= 10
    assert (ours[2] != truth[2]).sum() <= 132 + 3
    # the interpreter cuts bf16 off where a GPU rounds
    rotary, rounded = (fp8_keys.decode_latents(each, 512)[:, 512:] for each in (rows, expected))
    torch.testing.assert_close(rotary, rounded, rtol=2**-7, atol=0)
    assert fp8_keys.decode_latents(rows[inputs["slots"][3]], 512)[:512].isnan().all()
    index_key = fp8_keys.decode_index_keys(ours[2], inputs["slots"])
    assert index_key[4].isnan().all()
    assert index_key[3].isfinite().all()


@pytest.mark.parametrize("seed", range(8))
def test_sampling_gives_the_tokens_of_the_reference(seed: int):
    """Ties, banned tokens, flat and steep rows, every mixture of rules."""
    arguments = sampling_inputs(seed, rows=12, vocabulary=(17, 300, 2500, 9000)[seed % 4])
    sample = OPS["sample"].backends
    assert torch.equal(sample["triton"](*arguments), sample["torch"](*arguments))


def test_greedy_rows_take_the_lowest_id_of_a_tie_in_any_stretch():
    logits = torch.zeros(3, 9000)
    logits[0, [8999, 4096, 5000]] = 1.0
    logits[1, [3, 4100]] = 1.0
    sample = OPS["sample"].backends["triton"]
    assert sample(logits, None).tolist() == [4096, 3, 0]


@pytest.mark.parametrize("uniform", [0.0, 0.25, 0.875])
def test_ties_that_fill_more_than_one_block(uniform: float):
    """Of 9000 equal tokens the first 5000 are kept."""
    one = torch.ones(1)
    rules = (one, torch.tensor([5000]), one, one * 0, one * uniform)
    found = int(OPS["sample"].backends["triton"](torch.zeros(1, 9000), *rules))
    assert found == int(5000 * uniform)


def test_min_p_of_one_keeps_the_best():
    one = torch.ones(1)
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0]])
    sample = OPS["sample"].backends["triton"]
    chosen = [int(sample(logits, one, torch.tensor([0]), one, one, one * u)) for u in (0.0, 0.9)]
    assert chosen == [1, 3]


def test_both_zeros_are_equal_to_top_k():
    logits = torch.tensor([[-1.0, -0.0, 0.0, -0.0]])
    one: Tensor = torch.ones(1)
    chosen = {
        int(OPS["sample"].backends["triton"](logits, one, torch.tensor([2]), one, one * 0, one * u))
        for u in (0.0, 0.49, 0.51, 0.99)
    }
    assert chosen == {1, 2}


def test_routing_shows_a_nan_and_stays_in_range():
    logits = torch.zeros(2, 12)
    logits[0, 7] = torch.nan
    weights, ids = OPS["route"].backends["triton"](logits, torch.zeros(12), 3, 1, 1, True, 1.0)
    assert weights[0].isnan().any()
    assert ids.tolist() == [[7, 0, 1], [0, 1, 2]]
    assert weights[1].isfinite().all()


def test_routing_does_not_blow_up_scores_of_nothing():
    weights, ids = OPS["route"].backends["triton"](
        torch.full((1, 12), -80.0), torch.zeros(12), 3, 1, 1, True, 1.0
    )
    assert float(weights.max()) < 1e-10
    assert ids.tolist() == [[0, 1, 2]]


def test_sorting_takes_int32_too():
    ids = torch.tensor([[2, -1], [0, 2]])
    sort = OPS["sort_tokens"].backends["triton"]
    for wide, narrow in zip(sort(ids, 4, 2, 2), sort(ids.int(), 4, 2, 2), strict=True):
        assert torch.equal(wide, narrow)
