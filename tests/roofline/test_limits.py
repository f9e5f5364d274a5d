"""The cost model against figures worked out by hand for one rank of GLM-5."""

from __future__ import annotations

import pytest

from tests.factories import TINY_GLM
from tetrad.core.arch import ModelArch
from tetrad.core.keys import ACTIVATION, FP8, KeyFormat
from tetrad.core.presets import preset
from tetrad.core.ranks import Ranks
from tetrad.roofline.cost import OpCall, StepLoad, step_calls
from tetrad.roofline.limits import Rates

GLM = preset("glm-5")
EIGHT = Ranks(tp=8, ep=8, attn_dp=8)
H200 = Rates(tb_per_s=4.3, tflops=790.0, link_gb_per_s=400.0)
WQ_B_MS = 78 * 2048 * 32 * 128 * 2 / 4.3e9
"""The indexer's queries, which a short context has no use for."""


def limit_ms(ranks: Ranks, batch: int, context: int, keys: KeyFormat = ACTIVATION) -> float:
    calls = step_calls(GLM, ranks, StepLoad(batch, context, keys=keys))
    return sum(map(H200.limit_us, calls)) / 1e3


@pytest.mark.parametrize(
    ("batch", "by_hand_ms"), [(8, 10.7), (64, 18.4), (256, 20.1), (1024, 20.9), (2048, 27.8)]
)
def test_one_rank_of_eight(batch: int, by_hand_ms: float):
    found = limit_ms(EIGHT, batch, 256)
    tolerance = 0.06 if batch == 2048 else 0.015
    assert found == pytest.approx(by_hand_ms - WQ_B_MS, rel=tolerance)


def test_a_long_context_reads_chosen_keys_and_all_index_keys():
    """21.9 ms with index keys of 132 bytes; with 256 bytes each they take as much longer."""
    longer = 78 * 32 * 8192 * (256 - 132) / 4.3e9
    assert limit_ms(EIGHT, 256, 8192) == pytest.approx(21.9 + longer, rel=0.015)


def test_fp8_keys_take_132_and_656_bytes():
    assert limit_ms(EIGHT, 256, 8192, keys=FP8) == pytest.approx(
        21.9 - 78 * 32 * 2048 * (1152 - 656) / 4.3e9, rel=0.015
    )
    calls = step_calls(GLM, EIGHT, StepLoad(64, 8192, keys=FP8))
    read = {call.op: call.bytes for call in calls if call.op in ("mla", "index_score")}
    assert read == {"mla": 8 * 2048 * 656, "index_score": 8 * 8192 * 132}


def test_bytes_are_those_of_the_weights():
    """25.74 GB of attention, 0.15 of the indexer joined to it, 5.66 of shared experts, 1.36 dense,
    0.24 router, 1.9 / 8 head."""
    calls = step_calls(GLM, EIGHT, StepLoad(8, 256))

    def total_gb(*parts: str, but: tuple[str, ...] = ()) -> float:
        return sum(c.bytes * c.count for c in calls if c.part in parts and c.op not in but) / 1e9

    assert total_gb("attention", but=("mla",)) == pytest.approx(25.74 + 0.15, rel=0.002)
    assert total_gb("moe", but=("experts",)) == pytest.approx(5.66 + 0.24, rel=0.002)
    assert total_gb("dense") == pytest.approx(1.36, rel=0.002)
    assert total_gb("head") == pytest.approx(1.9 / 8, rel=0.002)
    all_read = step_calls(GLM, EIGHT, StepLoad(20_000, 256))
    experts = [c.bytes * c.count for c in all_read if c.op == "experts"]
    assert sum(experts) / 1e9 == pytest.approx(407.7 / 8, rel=0.002)


def test_flops_of_a_token():
    """45.3 GFLOP in experts, 36.4 in other products, and attention's own."""
    calls = step_calls(GLM, Ranks(), StepLoad(1, 4096))
    experts = sum(c.flops * c.count for c in calls if c.op == "experts")
    core = sum(c.flops * c.count for c in calls if c.op == "mla")
    scores = sum(c.flops * c.count for c in calls if c.op == "index_score")
    others = sum(c.flops * c.count for c in calls) - experts - core - scores
    assert experts == pytest.approx(45.3e9, rel=0.002)
    assert others == pytest.approx((34.5 + 1.9) * 1e9, rel=0.01)
    assert core == pytest.approx(139_264 * 2048 * 78, rel=0.002)
    assert scores == pytest.approx(8192 * 4096 * 78, rel=0.01)


@pytest.mark.parametrize(("context", "read"), [(256, 256), (8192, 2048)])
def test_a_decode_reads_its_latents_and_no_queries(context: int, read: int):
    calls = step_calls(GLM, EIGHT, StepLoad(64, context))
    (core,) = (c for c in calls if c.op == "mla")
    assert core.bytes == 8 * read * 576 * 2


def test_a_prompt_reads_its_keys_once():
    """However many rows of it read them; operations grow with the square, fewer where keys and
    values are expanded: 1024 instead of 2176 a head and pair, 2 * 512 * 448 a token either way."""
    calls = step_calls(GLM, Ranks(), StepLoad(2, 2048, query_len=2048))
    (core,) = (c for c in calls if c.what == "expanded keys and values")
    weights = 64 * 512 * 448
    assert core.bytes == 2 * 2048 * 576 * 2 + 2 * weights
    assert core.flops == pytest.approx(2048 * 2049 * 64 * 1024 + 4096 * 2 * weights)
    calls_of_a_chunk = step_calls(GLM, Ranks(), StepLoad(1, 2048, query_len=2047))
    (chunk,) = (c for c in calls_of_a_chunk if c.op == "mla")
    assert chunk.flops == pytest.approx((2048 * 2049 / 2 - 1) * 64 * 2176)
    assert chunk.bytes == 2048 * 576 * 2
    (head,) = (c for c in calls if c.part == "head")
    assert head.flops == 2.0 * 2 * 154_880 * 6144
    (router,) = (c for c in calls if (c.part, c.op) == ("moe", "router"))
    assert router.flops == 2.0 * 4096 * 6144 * (256 + 2 * 2048)


def test_ranks_share_what_they_share():
    """Tensor parallelism cuts heads and columns, attention's data parallelism only the batch."""
    whole, eighth = (
        step_calls(GLM, ranks, StepLoad(64, 256)) for ranks in (Ranks(), Ranks(tp=8, ep=8))
    )

    def read(calls: tuple[OpCall, ...], part: str, what: str) -> float:
        (found,) = (c.bytes for c in calls if (c.part, c.what) == (part, what))
        return found

    assert read(whole, "attention", "o") == 8 * read(eighth, "attention", "o")
    front = "q_a, kv_a, index keys and weights"
    assert read(whole, "attention", front) == read(eighth, "attention", front)
    for what in ("absorbed keys", "absorbed values"):
        assert read(whole, "attention", what) == 8 * read(eighth, "attention", what)
    assert read(whole, "attention", "latents") == read(eighth, "attention", "latents")
    own = step_calls(GLM, EIGHT, StepLoad(64, 256))
    assert read(own, "attention", "o") == read(whole, "attention", "o")
    assert 8 * read(own, "attention", "latents") == read(whole, "attention", "latents")


def test_the_longer_of_reading_and_computing_counts():
    call = OpCall("moe", "linear", "", flops=790e6, bytes=8.6e6, count=3)
    assert H200.limit_us(call) == pytest.approx(6.0)
    assert H200.bound(call) == "memory"
    assert Rates(43.0, 790.0, 1.0).limit_us(call) == pytest.approx(3.0)
    assert Rates(43.0, 790.0, 1.0).bound(call) == "compute"
    assert H200.link_us(4e6) == pytest.approx(10.0)


def test_layers_that_share_a_choice_have_no_indexer_in_their_front():
    calls = step_calls(ModelArch.from_config(TINY_GLM), Ranks(), StepLoad(1, 5))
    fronts = {c.what: c for c in calls if (c.part, c.op) == ("attention", "router")}
    full, shared = fronts["q_a, kv_a, index keys and weights"], fronts["q_a, kv_a"]
    assert (full.count, shared.count) == (3, 1)
    index = TINY_GLM["index_head_dim"] + TINY_GLM["index_n_heads"]
    assert full.bytes - shared.bytes == index * TINY_GLM["hidden_size"] * 2


def test_a_model_without_dense_layers_has_none():
    arch = ModelArch.from_config(TINY_GLM | {"first_k_dense_replace": 0, "mlp_layer_types": None})
    assert "dense" not in {c.part for c in step_calls(arch, Ranks(), StepLoad(1, 5))}
