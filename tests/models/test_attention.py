"""A layer's attention: what it launches, and when its products are joined."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.factories import TINY_GLM
from tests.models.recorded import OnDevice, Recorder, Stored, seeded, torch_ops
from tetrad.bench.kernels.breakdown import breakdown
from tetrad.bench.rank.run import step_batch
from tetrad.core.arch import ModelArch
from tetrad.formats.weights import DenseWeight, Weight
from tetrad.kernels.backend import Backend
from tetrad.kernels.select import OpSet, resolve_ops
from tetrad.kernels.timer import CudaTimer
from tetrad.layers.batch import ForwardBatch
from tetrad.layers.cache import KvCache
from tetrad.layers.decoder import DecoderLayer
from tetrad.layers.mla import MlaAttention
from tetrad.layers.rope import Rope
from tetrad.layers.source import WeightLedger, WeightSource

ARCH = ModelArch.from_config(TINY_GLM)
CPU = torch.device("cpu")
FULL, SHARED = 1, 2
"""Layers with an indexer of their own and without, both with experts."""
ATTENTION = ["router", "latents", "linear", "absorb", "mla", "head_linear", "linear"]
EXPERTS = ["router", "route_activate", "linear", "experts"]
CHOICE = ["linear", "rope", "index_score", "index_select"]


class StoredApart(Stored):
    """The heads' weights of the indexer in fp32, all else in bf16."""

    def linear(self, module: str, shape: tuple[int, int]) -> Weight:
        if "weights_proj" in module:
            return Stored(dtype=torch.float32).linear(module, shape)
        return super().linear(module, shape)


def source_of(stored: Stored, ops: OpSet, dtype: torch.dtype = torch.float32) -> WeightSource:
    return WeightSource(stored, ops, dtype, WeightLedger())


def step(num_tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """All tokens of one sequence at once: hidden states, batch, angles, cache full of NaN, and no
    choice of keys."""
    positions = torch.arange(num_tokens)
    one = torch.tensor([num_tokens], dtype=torch.int32)
    batch = ForwardBatch(
        token_ids=positions, positions=positions, slots=positions + 64,
        query_start=torch.tensor([0, num_tokens], dtype=torch.int32), kv_lens=one,
        page_table=torch.tensor([[1]], dtype=torch.int32), logit_rows=positions,
        query_lens=(num_tokens,), kv_lens_host=(num_tokens,),
    )  # fmt: skip
    cache = KvCache(ARCH, 2, CPU, dtype)
    cache.poison()
    x = torch.randn(num_tokens, ARCH.hidden, generator=seeded("rows")).to(dtype)
    return x, batch, Rope(ARCH.rope, CPU)(positions), cache, None


def recorded(stored: Stored, layer: int, num_tokens: int) -> Recorder:
    seen = Recorder()
    decoder = DecoderLayer(ARCH, layer, source_of(stored, seen.wrapped(torch_ops())))
    arguments = step(num_tokens)
    arguments[1].ragged.seen  # noqa: B018  # what all layers share
    with seen:
        decoder(*arguments)
    return seen


@pytest.mark.parametrize("layer", [FULL, SHARED])
def test_a_decoder_layer_takes_sixteen_launches(layer: int):
    """Nine of norms and attention, seven of experts, where rows are few; where keys are split `mla`
    is two. Neither a cast nor a copy nor an addition is between them."""
    seen = recorded(Stored("mlp.experts."), layer, 12)
    assert seen.ops == ["rms_norm", *ATTENTION, "add_rms_norm", *EXPERTS]
    assert seen.torch == []
    assert sum({"experts": 4}.get(name, 1) for name in seen.ops) == 9 + 7


def test_a_choice_of_keys_takes_four_more():
    seen = recorded(Stored("mlp.experts."), FULL, 20)
    first, second = ATTENTION[:2], ATTENTION[2:]
    assert seen.ops == ["rms_norm", *first, *CHOICE, *second, "add_rms_norm", *EXPERTS]
    assert seen.torch == []


def test_quantised_products_stand_apart():
    for name in ("self_attn.q_a", "self_attn.kv_a", "self_attn.indexer.wk"):
        seen = recorded(Stored("mlp.experts.", name), FULL, 12)
        assert seen.ops == [
            "rms_norm", *["linear"] * 3, *ATTENTION[1:], "add_rms_norm", *EXPERTS
        ]  # fmt: skip
        seen = recorded(Stored("mlp.experts.", name), FULL, 20)
        choice = [*CHOICE[:2], "router", *CHOICE[2:]]
        assert seen.ops[1:9] == ["linear"] * 3 + ["latents"] + choice[:4]
        assert seen.torch == []


def test_head_weights_that_are_stored_wider_are_not_rounded_to_be_joined():
    """They are multiplied by themselves where keys are chosen."""
    attention = MlaAttention(ARCH, FULL, source_of(StoredApart(), torch_ops(), torch.bfloat16))
    assert attention.indexer is not None
    assert len(attention.front.weights) == 1
    exact = StoredApart().linear("indexer.weights_proj", (16, ARCH.hidden))
    kept = attention.indexer.weights
    assert isinstance(kept, DenseWeight)
    assert torch.equal(kept.data, exact.dequantize(torch.float32))


@pytest.mark.parametrize("stored", [Stored(), StoredApart(), Stored("q_a", "kv_a")])
def test_the_scorer_gets_head_weights_that_nobody_rounded(stored: Stored):
    """Of bf16 activations, whether their matrix is joined or not."""
    given: list[Tensor] = []
    ops = torch_ops()

    def run(queries: Tensor, weights: Tensor, *rest: Any) -> Tensor:
        given.append(weights)
        scores: Tensor = ops.index_score(queries, weights, *rest)
        return scores

    watched = replace(ops, index_score=Backend("watched", run))
    x, *rest = step(20, torch.bfloat16)
    MlaAttention(ARCH, FULL, source_of(stored, watched, torch.bfloat16))(x, *rest)
    matrix = stored.linear("indexer.weights_proj", (16, ARCH.hidden)).dequantize(torch.float32)
    exact = x.double() @ matrix.double().T
    (found,) = given
    assert float((found - exact).norm() / exact.norm()) < 1e-6


@pytest.mark.parametrize("num_tokens", [12, 20])
@pytest.mark.parametrize("layer", [FULL, SHARED])
def test_joined_products_give_what_separate_ones_give(
    layer: int, num_tokens: int, monkeypatch: pytest.MonkeyPatch
):
    def run() -> tuple[Tensor, Tensor | None]:
        attention = MlaAttention(ARCH, layer, source_of(Stored(), torch_ops()))
        assert len(attention.front.weights) == num_products
        return attention(*step(num_tokens))

    num_products = 1
    joined, chosen = run()
    monkeypatch.setattr(WeightSource, "can_join", lambda self, weights: False)
    num_products = 3 if layer == FULL else 2
    apart, chosen_apart = run()
    assert joined.isfinite().all()
    torch.testing.assert_close(joined, apart)
    assert (chosen is None) == (chosen_apart is None) == (layer == SHARED or num_tokens == 12)
    if chosen is not None and chosen_apart is not None:
        assert torch.equal(chosen, chosen_apart)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 8, 64, 512])
@pytest.mark.parametrize("layer", [FULL, SHARED])
def test_attention_takes_seven_launches_on_a_gpu(layer: int, num_rows: int):
    """A step of decodes. cuBLAS may add one to a product whose sum it splits, `mla` another."""
    place, dtype = torch.device("cuda"), torch.bfloat16
    arch = replace(ARCH, hidden=1024, mla=replace(ARCH.mla, q_lora_rank=512, kv_lora_rank=256))
    ops = resolve_ops("cuda", dtype=dtype)
    attention = MlaAttention(arch, layer, WeightSource(OnDevice(), ops, dtype, WeightLedger()))
    batch = step_batch(num_rows, 1, 12, 100, place)
    cache = KvCache(arch, num_rows, place, dtype)
    rotation = Rope(arch.rope, place)(batch.positions)
    x = torch.randn(num_rows, arch.hidden, device=place).to(dtype)

    def call() -> Tensor:
        return attention(x, batch, rotation, cache, None)[0]

    timer = CudaTimer(place)
    found = timer.time([call], 0.05)
    assert found.method == "graph", found.note
    names = [launch.name for launch in breakdown(call, timer.flush)]
    extra = [name for name in names if "splitk" in name.lower() or "combine" in name.lower()]
    assert found.launches is not None
    most = 7 if num_rows <= 64 else 8
    assert found.launches - len(extra) <= most, names
