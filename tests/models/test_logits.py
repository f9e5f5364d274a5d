"""Our logits are Hugging Face's, however a sequence is cut into steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import oracle
from tests.models.driver import Driver, Step
from tetrad.kernels.select import resolve_ops
from tetrad.layers.embedding import Embedding
from tetrad.models.latent import LatentModel
from tetrad.models.loader import load_model

NUM_TOKENS = 83
"""Longer than index_topk (16) and than a page (64)."""

ONE_SHOT: list[Step] = [[(0, NUM_TOKENS)]]
CHUNKED: list[Step] = [[(0, n)] for n in (5, 11, 1, 40, 26)]
TOKEN_BY_TOKEN: list[Step] = [[(0, 1)]] * NUM_TOKENS
SCHEDULES = {"one-shot": ONE_SHOT, "chunked": CHUNKED, "token by token": TOKEN_BY_TOKEN}

RAGGED: list[Step] = [
    [(0, 7)],
    [(1, 40), (0, 1)],
    [(0, 1), (2, 3), (1, 1)],
    [(2, 1), (1, 1), (0, 1)],
    [(0, 60), (1, 1), (2, 16), (3, 1)],
    [(0, 1), (1, 27), (2, 1)],
    [(0, 12)],
]
"""Prompts of several lengths join, grow side by side in changing order, and end."""
RAGGED_LENGTHS = (83, 70, 21, 1)


@dataclass(frozen=True)
class Pair:
    theirs: Any
    ours: LatentModel
    sequences: list[Tensor]
    truth: list[Tensor]


@pytest.fixture(scope="module", params=[oracle.glm, oracle.deepseek], ids=["glm", "deepseek"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    make: Callable[[], Any] = request.param
    theirs = make()
    folder = oracle.save(theirs, tmp_path_factory.mktemp("model"))
    ours = load_model(folder, device="cpu", dtype=torch.float32, ops=resolve_ops("cpu"))
    assert isinstance(ours, LatentModel)
    generator = torch.Generator().manual_seed(1)
    vocab = theirs.config.vocab_size
    sequences = [torch.randint(vocab, (n,), generator=generator) for n in RAGGED_LENGTHS]
    return Pair(theirs, ours, sequences, [oracle.logits(theirs, ids) for ids in sequences])


def assert_equal_logits(ours: Tensor, truth: Tensor, tolerance: float = 1e-4) -> None:
    assert ours.dtype == torch.float32
    assert float(truth.std()) > 1.0, "logits so small that any model would pass"
    torch.testing.assert_close(ours, truth, rtol=0.0, atol=tolerance)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_one_sequence(pair: Pair, schedule: list[Step]):
    (ours,) = Driver(pair.ours, pair.sequences[:1]).run(schedule)
    assert_equal_logits(ours, pair.truth[0])


def test_ragged_sequences_side_by_side(pair: Pair):
    for ours, truth in zip(Driver(pair.ours, pair.sequences).run(RAGGED), pair.truth, strict=True):
        assert_equal_logits(ours, truth)


def test_a_sequence_that_turns_nan_does_not_touch_the_others(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    """Its keys, its choice of keys and its experts' rows are its own."""
    unused = pair.theirs.config.vocab_size - 1
    assert isinstance(pair.ours.embed, Embedding)
    table = pair.ours.embed.table.clone()
    table[unused] = torch.nan
    monkeypatch.setattr(pair.ours.embed, "table", table)
    sequences = [ids.clone().clamp(max=unused - 1) for ids in pair.sequences]
    truth = [oracle.logits(pair.theirs, ids) for ids in sequences]
    sequences[1][41] = unused
    ours = Driver(pair.ours, sequences).run(RAGGED)
    assert bool(ours[1][41:].isnan().all())
    assert_equal_logits(ours[1][:41], truth[1][:41])
    for sequence in (0, 2):
        assert_equal_logits(ours[sequence], truth[sequence])


def test_only_wanted_rows_get_logits(pair: Pair):
    driver = Driver(pair.ours, pair.sequences[:1])
    batch = driver.batch([(0, NUM_TOKENS)])
    rows = torch.tensor([NUM_TOKENS - 1, 20])
    wanted = type(batch)(**{**vars(batch), "logit_rows": rows})
    assert_equal_logits(pair.ours(wanted, driver.cache), pair.truth[0][rows])


def test_the_comparison_would_notice_a_dense_attention(pair: Pair):
    """Past index_topk tokens the choice of keys matters, before it does not."""
    far = oracle.randomised(type(pair.theirs)(pair.theirs.config))
    for layer in far.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.index_topk = 10**6
    dense = oracle.logits(far, pair.sequences[0])
    difference = (dense - pair.truth[0]).abs().amax(-1)
    assert float(difference[:16].max()) < 1e-4
    assert float(difference[16:].max()) > 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("make", [oracle.glm, oracle.deepseek], ids=["glm", "deepseek"])
def test_on_a_gpu(make: Callable[[], Any], tmp_path):
    """fp32 without TF32 equals the CPU's truth; looser, as sums run in another order."""
    assert not torch.backends.cuda.matmul.allow_tf32
    theirs = make()
    folder = oracle.save(theirs, tmp_path)
    ours = load_model(folder, device="cuda", dtype=torch.float32, ops=resolve_ops("cuda"))
    ids = torch.randint(96, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))
    truth = oracle.logits(theirs, ids)
    for schedule in (ONE_SHOT, CHUNKED):
        (logits,) = Driver(ours, [ids], device="cuda").run(schedule)
        assert_equal_logits(logits, truth, tolerance=1e-3)


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], ids=["cpu", "cuda"]
)
def test_bf16_stays_close(device: str, tmp_path):
    """Where rounding cannot flip a choice: every key is read, a large bias picks the experts."""
    theirs = oracle.glm(index_topk=4096)
    for layer in theirs.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias *= 100
    folder = oracle.save(theirs, tmp_path)
    ops = resolve_ops(device, dtype=torch.bfloat16)
    ours = load_model(folder, device=device, dtype=torch.bfloat16, ops=ops)
    ids = torch.randint(96, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))
    truth = oracle.logits(theirs, ids)
    driver = Driver(ours, [ids], device=device, dtype=torch.bfloat16)
    (logits,) = driver.run(CHUNKED)
    cosine = torch.nn.functional.cosine_similarity(logits, truth)
    assert float(cosine.min()) > 0.98
