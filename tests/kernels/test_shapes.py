"""A real model's shapes, and the inputs of large cases."""

from __future__ import annotations

import pytest
import torch

from tetrad.core.errors import ConfigError
from tetrad.core.presets import PRESETS, preset
from tetrad.core.ranks import Ranks
from tetrad.kernels.contract import Case
from tetrad.kernels.draw import Draw
from tetrad.kernels.registry import OPS
from tetrad.kernels.shapes import Load, cases_for, rows_per_expert, step_tokens

GLM = preset("glm-5")
OF_OTHER_MODELS = {"gqa", "qkv"}


def first(op: str, ranks: Ranks, load: Load) -> Case:
    return cases_for(op, GLM, ranks, load)[0]


def test_ops_of_other_models_have_no_shapes_here():
    for op in OF_OTHER_MODELS:
        assert not cases_for(op, GLM, Ranks(), Load(64))


def test_presets_are_models():
    for name in PRESETS:
        assert preset(name).num_layers > 0
    assert (GLM.hidden, GLM.moe.num_experts, GLM.mla.num_heads, GLM.vocab) == (
        6144, 256, 64, 154880,
    )  # fmt: skip


@pytest.mark.parametrize("op", sorted(set(OPS) - OF_OTHER_MODELS))
def test_every_op_has_shapes_and_costs_at_a_real_models_size(op: str):
    cases = cases_for(op, GLM, Ranks(tp=8, ep=8), Load(64))
    assert cases
    for case in cases:
        assert case.is_large
        assert OPS[op].contract.flops(case) >= 0
        assert OPS[op].contract.bytes(case, 2) > 0


def test_ranks_divide_what_they_should():
    whole, shared = Load(8), Ranks(tp=8, ep=8)
    assert first("experts", Ranks(), whole)["E"] == 256
    assert (first("experts", shared, whole)["E"], first("experts", shared, whole)["F"]) == (
        32,
        2048,
    )
    assert first("experts", Ranks(tp=8), whole)["F"] == 256
    assert first("experts", Ranks(tp=8, ep=2), whole)["F"] == 512
    assert first("experts", Ranks(ep=8), whole)["F"] == 2048
    assert first("mla", shared, whole)["H"] == 8
    assert first("linear", shared, whole)["out"] == 256


def test_the_routers_product_is_joined_with_the_shared_experts():
    joined, alone, front = cases_for("router", GLM, Ranks(tp=8, ep=8), Load(8))
    assert (joined["out"], joined["width"], alone["out"]) == (256 + 2 * 256, 6144, 256)
    assert front["out"] == 2048 + 576 + 128 + 32
    assert first("router", Ranks(ep=8), Load(8))["out"] == 256 + 2 * 2048
    assert first("route", Ranks(ep=8), Load(8))["held"] == (0, 32)
    assert first("route_activate", Ranks(), Load(8))["F"] == 2048


def test_large_steps_are_prompts():
    """Their rows attend as one sequence, and few of them are sampled."""
    small, large = (first("mla", Ranks(), Load(n, context=100)) for n in (4, 300))
    assert small["lens"] == ((1, 100),) * 4
    assert large["lens"] == ((300, 300),)
    assert first("index_select", Ranks(), Load(300, context=100))["M"] == 300
    assert first("sample", Ranks(), Load(300))["R"] == 256
    assert first("sample", Ranks(), Load(4))["R"] == 4


@pytest.mark.parametrize(
    ("ranks", "sentence"),
    [
        (Ranks(ep=7), "256 experts cannot be dealt to 7 ranks"),
        (Ranks(tp=3), "64 attention heads cannot be dealt to 3 ranks"),
        (Ranks(tp=8, ep=3), "tp must be a multiple of ep"),
    ],
)
def test_ranks_that_do_not_divide_are_refused(ranks: Ranks, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        ranks.check(GLM)


def test_uniform_routing_gives_every_expert_the_same():
    load = Load(0, "uniform", tokens_per_expert=16)
    assert rows_per_expert(GLM, Ranks(ep=8), load) == (16,) * 32
    assert step_tokens(GLM, load) == 512
    assert rows_per_expert(GLM, Ranks(ep=8), Load(512, "uniform")) == (16,) * 32
    assert sum(rows_per_expert(GLM, Ranks(ep=8), Load(5, "uniform"))) == 5


def test_random_routing_spreads_and_skewed_routing_does_not():
    random, skewed = (
        rows_per_expert(GLM, Ranks(ep=8), Load(2048, routing)) for routing in ("random", "skewed")
    )
    assert len(random) == len(skewed) == 32
    assert 1900 < sum(random) < 2200
    assert max(random) < 100
    assert max(skewed) > 300
    assert min(skewed) < 10
    assert random == rows_per_expert(GLM, Ranks(ep=8), Load(2048, "random"))


def test_bytes_count_the_experts_that_really_have_rows():
    case = first("experts", Ranks(ep=8), Load(64, "skewed"))
    touched = sum(count > 0 for count in case["rows_per_expert"])
    assert touched < 32
    per_expert = 3 * 6144 * 2048 * 4.5 / 8
    assert OPS["experts"].contract.bytes(case, 0) == pytest.approx(touched * per_expert)


def test_drawn_rows_are_those_of_the_case():
    values = dict(OPS["experts"].contract.cases[0].values) | {
        "T": 6, "K": 1, "E": 8, "rows_per_expert": (3, 0, 1, 0, 0, 0, 0, 2),
    }  # fmt: skip
    inputs = OPS["experts"].check.inputs(
        Case("dealt", values, True), torch.float32, torch.device("cpu")
    )
    assert inputs["ids"].shape == (6, 1)
    assert inputs["ids"].flatten().bincount(minlength=8).tolist() == [3, 0, 1, 0, 0, 0, 0, 2]
    assert inputs["ids"].flatten().tolist() != sorted(inputs["ids"].flatten().tolist())


@pytest.mark.parametrize("stored", ["bf16", "fp8_tensor", "fp8_block", "nvfp4"])
@pytest.mark.parametrize("num", [0, 3], ids=["matrix", "stack"])
def test_quick_weights_have_gain_one_and_use_every_code(stored: str, num: int):
    draw = Draw.of(Case("quick", {}, is_large=True), torch.float32, torch.device("cpu"))
    weight = draw.weights(stored, num, 192, 320) if num else draw.weight(stored, 192, 320)
    assert weight.format_name == stored
    assert weight.shape == ((num, 192, 320) if num else (192, 320))
    values = weight.dequantize(torch.float32)
    assert float(values.std()) * 320**0.5 == pytest.approx(1.0, abs=0.35)
    assert float(values.mean()) * 320**0.5 == pytest.approx(0.0, abs=0.02)
    if stored == "nvfp4":
        codes = weight.tensors()["codes"]
        assert set((codes & 15).unique().tolist()) == set(range(16))
        assert set((codes >> 4).unique().tolist()) == set(range(16))


def test_linears_come_in_every_format_a_quantised_one_first():
    cases = cases_for("linear", GLM, Ranks(), Load(8))
    assert cases[0]["format"] == "nvfp4"
    assert {case["format"] for case in cases} == {"nvfp4", "fp8_block", "bf16"}
    sizes = {(case["out"], case["width"]) for case in cases if case["format"] == "fp8_block"}
    assert {(2048, 6144), (6144, 2048), (12288, 6144)} <= sizes


def test_a_prompt_reads_its_keys_once_and_a_decode_what_it_selected():
    """Bytes in the cache, results and queries left out."""
    contract = OPS["mla"].contract
    decode, prompt = (first("mla", Ranks(), Load(n, context=8192)) for n in (32, 8192))
    rows = 64 * (2 * 512 + 64)
    assert contract.bytes(decode, 2) == 2 * 32 * (2048 * 576 + rows)
    assert contract.bytes(prompt, 2) == 2 * 8192 * (576 + rows)
    assert contract.flops(decode) == 32 * 2048 * 139_264
