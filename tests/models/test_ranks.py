"""The ranks of a layout together are the whole model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.factories import TINY_GLM
from tests.models.driver import Driver
from tests.models.threads import ThreadCollectives, run_all
from tetrad.core.arch import ModelArch
from tetrad.core.errors import CheckpointError, ConfigError
from tetrad.core.presets import preset
from tetrad.core.ranks import Ranks
from tetrad.data import embedded_model
from tetrad.distributed.collectives import Solo
from tetrad.distributed.rehearsal import Rehearsal, draw_choices
from tetrad.formats import fp8, nvfp4
from tetrad.formats.shares import share
from tetrad.formats.weights import DenseWeight
from tetrad.kernels.select import resolve_ops
from tetrad.layers.moe import Moe
from tetrad.layers.moe_ranks import moe_of
from tetrad.layers.norm import formed
from tetrad.layers.source import WeightLedger, WeightSource
from tetrad.models.dummy import DummyWeights, dummy_model
from tetrad.models.loader import load_model
from tetrad.models.shards import cut_of

CPU = torch.device("cpu")
ABACUS = ModelArch.from_folder(embedded_model())
SCHEDULES = ("indexer_types", "mlp_layer_types", "index_topk_pattern")
LAST = ((1, 0), (2, 0), (2, 1))
LAYOUTS = (
    Ranks(tp=2),
    Ranks(tp=2, ep=2),
    Ranks(tp=4, ep=2),
    Ranks(tp=2, ep=2, attn_dp=2),
    Ranks(tp=4, ep=4, attn_dp=2),
    Ranks(tp=4, ep=2, attn_dp=4),
    Ranks(pp=2),
    Ranks(tp=2, ep=2, attn_dp=2, pp=2),
)


def prompts(num: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(300, (n,), generator=generator) for n in (70, 9, 33, 66)[:num]]


def logits_of(model: Any, token_ids: list[Tensor]) -> list[Tensor]:
    """A prompt chunk of each, then the rest token by token for a while."""
    rest = [(0, len(token_ids[0]) - 5)] + [(i, len(ids)) for i, ids in enumerate(token_ids) if i]
    return Driver(model, token_ids).run([rest, *([[(0, 1)]] * 5)])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_all_ranks_together_give_the_logits_of_the_whole_model(layout: Ranks):
    """Heads, columns, experts and the output head are cut; keys of unwritten slots are NaN."""
    ops = resolve_ops("cpu")
    whole = load_model(embedded_model(), device="cpu", dtype=torch.float32, ops=ops)
    # Every group brings as many rows, since only those are exchanged.
    of_groups = [[ids + group for ids in prompts(2)] for group in range(layout.attn_dp)]
    expected = [logits_of(whole, ids) for ids in of_groups]

    def program(others: ThreadCollectives) -> list[Tensor]:
        model = load_model(
            embedded_model(), device="cpu", dtype=torch.float32, ops=ops, others=others
        )
        assert model.weight_bytes < whole.weight_bytes
        return logits_of(model, of_groups[others.ranks.attn_group])

    for rank, found in enumerate(run_all(layout, program)[-layout.tp :]):
        for mine, right in zip(found, expected[rank // layout.attn_tp], strict=True):
            torch.testing.assert_close(mine, right, rtol=2e-4, atol=2e-4)


def rehearsal(ranks: Ranks, arch: ModelArch = ABACUS, **changes: Any) -> Rehearsal:
    options: dict[str, Any] = {
        "most_rows": 8, "routing": "random", "seed": 0, "device": CPU, "dtype": torch.float32,
    }  # fmt: skip
    return Rehearsal(ranks, arch, **options | changes)


def test_a_rehearsed_rank_computes_its_part_of_real_rows():
    """Its experts' sums over own rows are those of the whole layer's experts it holds."""
    ranks = Ranks(tp=4, ep=4, attn_dp=4, rank=2)
    ops, weights = resolve_ops("cpu"), DummyWeights(CPU, torch.float32)
    source = WeightSource(
        weights, ops, torch.float32, WeightLedger(), others=rehearsal(ranks), prefix="mlp."
    )
    layer = moe_of(ABACUS, source)
    x = layer.place_for(5)
    assert x is not None
    x.normal_(generator=torch.Generator().manual_seed(3))
    held = ranks.held(ABACUS.moe.num_experts)
    alone = Moe(ABACUS, replace(source, others=Solo()), held)
    torch.testing.assert_close(formed(layer(x, x)), formed(alone(x, x)))


def test_others_rows_reach_the_experts():
    """All rows of all groups, each with K experts of which a share is the rank's."""
    ranks = Ranks(tp=8, ep=8, attn_dp=8, rank=3)
    stage = rehearsal(ranks, most_rows=64)
    exchange = stage.exchange(ABACUS)
    x, weights = torch.randn(64, ABACUS.hidden), torch.rand(64, ABACUS.moe.experts_per_token)
    ids = draw_choices(ABACUS.moe, 64, "random", torch.Generator().manual_seed(1))
    held = ranks.held(ABACUS.moe.num_experts)
    is_held = (ids >= held.start) & (ids < held.stop)
    for place, value in zip(exchange.own(64), (x, weights, ids - held.start), strict=True):
        place.copy_(value)
    exchange.own(64)[2][~is_held] = -1
    rows, local, slot_weights = exchange.dispatch(64)
    assert rows.shape == (512, ABACUS.hidden)
    assert (local >= 0).float().mean().item() == pytest.approx(1 / 8, rel=0.15)
    assert local.max() == 3
    torch.testing.assert_close(rows[-64:], x)
    torch.testing.assert_close(slot_weights[-64:], weights)
    torch.testing.assert_close(slot_weights[:-64].sum(1), torch.full((448,), ABACUS.moe.scaling))
    assert (local[-64:] >= 0).equal(is_held)


def test_others_rows_stay_as_they_were_drawn():
    """Whatever sizes came before: a step is the same each time."""
    stage = rehearsal(Ranks(tp=2, ep=2, attn_dp=2))
    before = stage.gather_rows(torch.ones(3, ABACUS.hidden))[:3].clone()
    stage.gather_rows(torch.ones(8, ABACUS.hidden))
    assert stage.gather_rows(torch.ones(3, ABACUS.hidden))[:3].equal(before)


def test_skewed_routing_gives_some_experts_much_more():
    counts = [
        draw_choices(preset("glm-5").moe, 2048, routing, torch.Generator().manual_seed(0))
        .flatten().bincount(minlength=256).float()
        for routing in ("random", "skewed")
    ]  # fmt: skip
    assert counts[0].max() < 1.5 * counts[0].mean()
    assert counts[1].max() > 3 * counts[1].mean()


def test_traffic_is_what_a_rank_receives():
    """bf16 rows of 8 groups: seven times the own ones each way, and 7/8 of the logits."""
    ranks, arch = Ranks(tp=8, ep=8, attn_dp=8), ABACUS
    stage = rehearsal(ranks, dtype=torch.bfloat16)
    exchange = stage.exchange(arch)
    x = torch.zeros(4, arch.hidden, dtype=torch.bfloat16)
    rows, _, _ = exchange.dispatch(4)
    exchange.combine(rows)
    stage.join_vocab(torch.zeros(32, arch.vocab // 8, dtype=torch.bfloat16))
    seven = 7 * 4 * arch.hidden * 2
    assert stage.traffic.num_bytes == {
        "dispatch": seven + 7 * 4 * arch.moe.experts_per_token * 12,
        "combine": seven,
        "join_vocab": 4 * arch.vocab * 2 * 7 / 8,
    }
    assert rehearsal(Ranks(tp=4)).all_reduce(x) is x
    split = rehearsal(Ranks(tp=4))
    split.all_reduce(x)
    assert split.traffic.total_bytes == 2 * x.nbytes * 3 / 4


@pytest.mark.parametrize("is_skewed", [False, True])
def test_dummy_activations_neither_explode_nor_vanish(is_skewed: bool):
    """Over as many layers as GLM-5 has, in a rehearsed rank as in the whole."""
    arch = ModelArch.from_config(TINY_GLM | {"num_hidden_layers": 78} | dict.fromkeys(SCHEDULES))
    for ranks in (Ranks(), Ranks(tp=2, ep=2, attn_dp=2)):
        model = dummy_model(
            arch, device=CPU, dtype=torch.float32, ops=resolve_ops("cpu"),
            others=rehearsal(ranks, arch, most_rows=80), is_skewed=is_skewed,
        )  # fmt: skip
        token_ids = [torch.arange(20) % arch.vocab, torch.arange(7) + 3]
        driver = Driver(model, token_ids)
        hidden = formed(model.forward(driver.batch([(0, 20), (1, 7)]), driver.cache))
        size = hidden.square().mean().sqrt().item()
        assert 3.0 < size < 20.0, size
        logits = Driver(model, token_ids).run([[(0, 20), (1, 7)]])
        assert 0.3 < torch.cat(logits).std().item() < 3.0


def test_dummy_weights_are_nvfp4_experts_and_dense_others():
    model = dummy_model(
        ABACUS, device=CPU, dtype=torch.bfloat16, ops=resolve_ops("cpu"), others=Solo()
    )
    report = model.weight_report
    real = load_model(
        embedded_model(), device="cpu", dtype=torch.bfloat16, ops=resolve_ops("cpu")
    ).weight_report
    assert {name: row["num_tensors"] for name, row in report.items()} == {
        name: row["num_tensors"] for name, row in real.items()
    }


def test_a_share_of_a_weight_holds_its_values():
    matrix = torch.randn(256, 512)
    for stored in (
        DenseWeight(matrix), nvfp4.quantize(matrix), fp8.quantize_tensor(matrix),
        fp8.quantize_block(matrix),
    ):  # fmt: skip
        for axis, dim in (("out", 0), ("in", 1)):
            parts = [share(stored, axis, part, 2) for part in range(2)]  # type: ignore[arg-type]
            joined = torch.cat([part.dequantize(torch.float32) for part in parts], dim)
            assert joined.equal(stored.dequantize(torch.float32))
    with pytest.raises(CheckpointError, match="16 of them share a scale"):
        share(nvfp4.quantize(torch.randn(2, 48)), "in", 0, 2)


def test_what_is_cut_and_how():
    ranks = Ranks(tp=8, ep=4, attn_dp=2, rank=5)
    assert cut_of("model.layers.3.self_attn.o_proj", ranks) == ("in", 1, 4)
    assert cut_of("model.layers.3.self_attn.indexer.wq_b", ranks)[2] == 1
    assert cut_of("model.layers.3.mlp.experts.7.down_proj", ranks) == ("in", 1, 2)
    assert cut_of("model.layers.3.mlp.shared_experts.up_proj", ranks) == ("out", 1, 4)
    assert cut_of("model.layers.3.mlp.gate", ranks)[2] == 1
    assert cut_of("lm_head", ranks) == ("out", 5, 8)
    assert ranks.held(256) == range(128, 192)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("pp=79", "78 layers do not fill 79 stages"),
        ("tp=2,attn_dp=8", "tp must be a multiple of it; tp=8 works"),
        ("ep=8", "tp must be a multiple of it; tp=8 works"),
        ("tp=2,rank=2", "has 2 ranks, counted from 0; rank=1 is the last"),
        ("tp=3", "64 attention heads cannot be dealt to 3 ranks"),
        ("tp=512,attn_dp=512,ep=256", "154,880 rows of the output head"),
    ],
)
def test_layouts_without_a_program_are_refused(text: str, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        Ranks.parse(text).check_program(preset("glm-5"), "--ranks")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("tp=0", "tp must be a whole number from 1 on"),
        ("dp=2", "there is no 'dp', only tp, ep"),
        ("tp=2,ep=2,tp=4", "tp is named twice"),
    ],
)
def test_ranks_that_are_none_are_refused(text: str, sentence: str):
    with pytest.raises(ValueError, match=sentence):
        Ranks.parse(text)


def test_a_stage_that_needs_anothers_choice_is_refused():
    """GLM-5's later versions share choices of keys; Abacus does so in layers 2 and 4."""
    with pytest.raises(ConfigError, match="stage 1 would begin with layer 2"):
        Ranks.parse("pp=3,rank=1").check_program(ABACUS, "--ranks")
    Ranks.parse("pp=2,rank=1").check_program(ABACUS, "--ranks")


def test_a_stage_holds_its_layers_and_ends():
    whole, first, last = (Ranks(pp=pp, rank=rank).arch_of(ABACUS) for pp, rank in LAST)
    assert whole == ABACUS
    assert (first.first_layer, first.num_layers, first.indexer.full_layers) == (0, 3, (0, 1))
    assert (last.first_layer, last.num_layers, last.indexer.full_layers) == (3, 3, (0, 2))
    assert (first.moe.first_dense_layers, last.moe.first_dense_layers) == (1, 0)


def test_ranks_read_what_they_write():
    ranks = Ranks(tp=8, ep=4, attn_dp=2, rank=5)
    assert Ranks.parse(str(ranks)) == ranks
    for nothing in ("", " , "):
        with pytest.raises(ValueError, match="a layout was expected, such as tp=8"):
            Ranks.parse(nothing)


def test_a_cpu_without_the_memory_says_so_before_anything_is_drawn():
    """An allocation beyond it would end in the process being killed."""
    with pytest.raises(ConfigError, match=r"experts of 75 layers take 2899 GB on a CPU.* --num-l"):
        dummy_model(
            preset("glm-5"),
            device=torch.device("cpu"),
            dtype=torch.float32,
            ops=resolve_ops("cpu"),
            others=Solo(),
        )
