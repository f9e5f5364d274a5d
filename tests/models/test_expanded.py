"""Whole prompts over expanded keys and values: the same as over latents, in fewer operations."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.factories import TINY_GLM
from tests.models.driver import Driver, Step
from tests.models.recorded import Recorder, Stored, seeded, torch_ops
from tetrad.core import keys as keys_module
from tetrad.core.arch import ModelArch
from tetrad.core.keys import ACTIVATION, FP8, KeyFormat, num_expanded
from tetrad.core.presets import preset
from tetrad.core.step import PAGE_TOKENS
from tetrad.data import embedded_model
from tetrad.kernels.device import waiting_is_an_error
from tetrad.kernels.select import OpSet, resolve_ops
from tetrad.layers.batch import ForwardBatch
from tetrad.layers.cache import KvCache
from tetrad.layers.mla import MlaAttention
from tetrad.layers.rope import Rope
from tetrad.layers.source import StoredWeights, WeightLedger, WeightSource
from tetrad.models.dummy import DummyWeights
from tetrad.models.loader import load_model

CPU = torch.device("cpu")
TINY = ModelArch.from_config(TINY_GLM)
KEYS = pytest.mark.parametrize("keys", [ACTIVATION, FP8])


def error(ours: Tensor, truth: Tensor) -> float:
    return float((ours.double() - truth.double()).norm() / truth.double().norm())


def prompts(lens: tuple[int, ...], device: torch.device) -> ForwardBatch:
    """Each on pages of its own, the last page first."""
    counts = [-(-n // PAGE_TOKENS) for n in lens]
    ends = list(accumulate(counts))
    tables = [list(range(end, end - count, -1)) for end, count in zip(ends, counts, strict=True)]
    padded = [table + [0] * (max(counts) - len(table)) for table in tables]
    slots = [
        table[at // PAGE_TOKENS] * PAGE_TOKENS + at % PAGE_TOKENS
        for table, n in zip(tables, lens, strict=True)
        for at in range(n)
    ]
    positions = torch.cat([torch.arange(n) for n in lens]).to(device)
    starts = torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=device)
    return ForwardBatch(
        token_ids=positions, positions=positions, slots=torch.tensor(slots, device=device),
        query_start=starts, kv_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        page_table=torch.tensor(padded, dtype=torch.int32, device=device),
        logit_rows=positions, query_lens=lens, kv_lens_host=lens,
    )  # fmt: skip


class Attention:
    """One layer, called on prompts from a poisoned cache."""

    def __init__(
        self, arch: ModelArch, stored: StoredWeights, ops: OpSet, dtype: torch.dtype,
        device: torch.device = CPU,
    ) -> None:  # fmt: skip
        self.arch, self.dtype, self.device = arch, dtype, device
        self.layer = MlaAttention(arch, 0, WeightSource(stored, ops, dtype, WeightLedger()))

    def __call__(self, lens: tuple[int, ...], keys: KeyFormat) -> Tensor:
        arguments = self.arguments(lens, keys)
        return self.layer(*arguments)[0]

    def arguments(self, lens: tuple[int, ...], keys: KeyFormat) -> tuple[Any, ...]:
        batch = prompts(lens, self.device)
        num_pages = sum(-(-n // PAGE_TOKENS) for n in lens) + 1
        cache = KvCache(self.arch, num_pages, self.device, self.dtype, keys)
        cache.poison()
        x = torch.randn(sum(lens), self.arch.hidden, generator=seeded("rows"))
        x = x.to(self.device, self.dtype)
        rotation = Rope(self.arch.rope, self.device)(batch.positions)
        return x, batch, rotation, cache, None


def both(attention: Attention, lens: tuple[int, ...], keys: KeyFormat) -> tuple[Tensor, Tensor]:
    """Over expanded keys and over latents."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys_module, "LEAST_EXPANDED", 1)
        expanded = attention(lens, keys)
        patch.setattr(keys_module, "LEAST_EXPANDED", 1 << 40)
        return expanded, attention(lens, keys)


@KEYS
@pytest.mark.parametrize("lens", [(1,), (16,), (5, 1, 16, 9)])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 2e-6), (torch.bfloat16, 0.01)])
def test_a_layer_gives_what_it_gives_absorbed(
    dtype: torch.dtype, most: float, lens: tuple[int, ...], keys: KeyFormat
):
    ops = resolve_ops("cpu", dtype=dtype, keys=keys)
    expanded, absorbed = both(Attention(TINY, Stored(), ops, dtype), lens, keys)
    assert error(expanded, absorbed) <= most
    assert sum(lens) == 1 or not torch.equal(expanded, absorbed)


def test_neither_absorbed_queries_nor_latent_attention_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(keys_module, "LEAST_EXPANDED", 1)
    seen = Recorder()
    attention = Attention(TINY, Stored(), seen.wrapped(torch_ops()), torch.float32)
    with seen:
        attention((5, 9), ACTIVATION)
    assert seen.ops == ["router", "latents", "linear", "rope", "linear"]


@pytest.mark.parametrize(
    ("query_lens", "kv_lens", "expected"),
    [
        ((256,), (256,), 1),
        ((256, 2048), (256, 2048), 2),
        ((1, 7, 100, 156), (700, 80, 100, 156), 2),
        ((100, 99), (100, 99), 0),
        ((99, 100), (99, 100), 1),
        ((256, 1), (256, 700), 0),
        ((2049, 300), (2049, 300), 1),
        ((256,), (300,), 0),
        ((1, 1), (1, 1), 0),
    ],
)
def test_whole_prompts_at_the_end_of_a_step(
    query_lens: tuple[int, ...],
    kv_lens: tuple[int, ...],
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
):
    """What reads keys of earlier steps, or not all of its keys, stays absorbed."""
    monkeypatch.setattr(keys_module, "LEAST_EXPANDED", 100)
    assert num_expanded(query_lens, kv_lens, 2048) == expected


def test_what_saves_operations():
    """Of GLM-5: both ways take as much for a token, and expanded keys take less for a pair."""
    mla = preset("glm-5").mla
    rank, nope, rope, value = mla.kv_lora_rank, mla.nope_dim, mla.rope_dim, mla.v_dim
    assert 2 * (2 * rank + rope) == 2176
    assert 2 * (nope + rope + value) == 1024
    assert 2 * rank * nope + 2 * rank * value == 2 * rank * (nope + value)


DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def answers(
    device: str, dtype: torch.dtype, keys: KeyFormat, least: int, patch: pytest.MonkeyPatch
) -> Tensor:
    """Logits of the embedded model: prompts at once, then decodes and chunks over the keys they
    left, a further prompt beside them. `least`: LEAST_EXPANDED."""
    patch.setattr(keys_module, "LEAST_EXPANDED", least)
    ops = resolve_ops(device, dtype=dtype, keys=keys)
    model = load_model(embedded_model(), device=device, dtype=dtype, ops=ops)
    ids = [torch.randint(2, 480, (n,), generator=seeded(str(n))) for n in (100, 64, 70)]
    steps: list[Step] = [[(0, 60), (2, 33)], [(0, 1), (2, 20), (1, 64)], [(0, 39), (2, 17)]]
    return torch.cat(Driver(model, ids, device, dtype, keys).run(steps)).cpu()


@KEYS
@pytest.mark.parametrize(
    ("device", "most"), [("cpu", 1e-5), pytest.param("cuda", 1e-3, marks=pytest.mark.gpu)]
)
def test_what_follows_a_prompt_fits_it(
    device: str, most: float, keys: KeyFormat, monkeypatch: pytest.MonkeyPatch
):
    expanded = answers(device, torch.float32, keys, 1, monkeypatch)
    absorbed = answers(device, torch.float32, keys, 1 << 40, monkeypatch)
    assert error(expanded, absorbed) <= (most if keys == ACTIVATION else max(most, 1e-2))


@KEYS
@DEVICE
def test_bf16_rounds_no_more(device: str, keys: KeyFormat, monkeypatch: pytest.MonkeyPatch):
    """The two ways round in different places: each is as far from fp32 as the other, some 4 %."""
    truth = answers("cpu", torch.float32, keys, 1 << 40, monkeypatch)
    expanded = answers(device, torch.bfloat16, keys, 1, monkeypatch)
    absorbed = answers(device, torch.bfloat16, keys, 1 << 40, monkeypatch)
    assert not torch.equal(expanded, absorbed)
    assert error(expanded, truth) <= 1.5 * error(absorbed, truth)


@pytest.mark.gpu
@KEYS
@pytest.mark.parametrize("lens", [(256,), (2048,), (700, 1000, 348), (2047,)])
def test_real_widths(lens: tuple[int, ...], keys: KeyFormat):
    """GLM-5's first layer in bf16; the host does not wait."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    ops = resolve_ops("cuda", dtype=dtype, keys=keys)
    arch = preset("glm-5")
    attention = Attention(arch, DummyWeights(device, dtype), ops, dtype, device)
    expanded, absorbed = both(attention, lens, keys)
    assert expanded.isfinite().all()
    assert error(expanded, absorbed) <= 0.02
    arguments = attention.arguments(lens, keys)
    with waiting_is_an_error():
        attention.layer(*arguments)
