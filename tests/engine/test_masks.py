"""Masks on logits, against a plain loop."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.fakes import tokens_of
from tetrad.core.request import Grammar, SamplingParams
from tetrad.core.step import SampleWork
from tetrad.engine import masks as masks_module
from tetrad.engine.grammars import Masks
from tetrad.engine.masks import allow_only, mask_bits
from tetrad.engine.sampler import Sampler
from tetrad.kernels.select import resolve_ops


def _same(masks: Masks) -> Masks:
    return masks


def reference(logits: torch.Tensor, rows: list[int], allowed: list[set[int]]) -> torch.Tensor:
    """A number at a time."""
    masked = logits.clone()
    for row, tokens in zip(rows, allowed, strict=True):
        for token in range(logits.shape[1]):
            if token not in tokens:
                masked[row, token] = -torch.inf
    return masked


def make_masks(
    rows: list[int], allowed: list[set[int]], vocab: int, also: tuple[tuple[int, int], ...] = ()
) -> Masks:
    width = (vocab + 31) // 32
    words = memoryview(bytearray((len(rows) + 2) * width * 4)).cast("I")
    for place, tokens in enumerate(allowed):
        for token in tokens:
            words[place * width + token // 32] |= 1 << token % 32
    return Masks(tuple(rows), words.cast("B").cast("i"), also)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_only_what_is_allowed_is_left(data: st.DataObject):
    vocab = data.draw(st.sampled_from([1, 31, 32, 33, 70, 512]))
    num_rows = data.draw(st.integers(1, 5))
    rows = data.draw(st.lists(st.integers(0, num_rows - 1), unique=True, min_size=1))
    allowed = [data.draw(st.sets(st.integers(0, vocab - 1))) for _ in rows]
    logits = torch.randn(num_rows, vocab)
    expected = reference(logits, rows, allowed)
    allow_only(logits, tuple(rows), mask_bits(make_masks(rows, allowed, vocab), vocab))
    assert torch.equal(logits, expected)


def test_many_rows_are_unpacked_piece_by_piece(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(masks_module, "ROWS_AT_ONCE", 2)
    rows = [4, 0, 2, 1, 3]
    allowed = [{row, 40 + row} for row in rows]
    logits = torch.randn(5, 64)
    expected = reference(logits, rows, allowed)
    allow_only(logits, tuple(rows), mask_bits(make_masks(rows, allowed, 64), 64))
    assert torch.equal(logits, expected)


def test_a_token_may_be_allowed_besides():
    masks = make_masks([0, 1], [{3}, {3}], 40, also=((1, 39), (1, 3), (0, 31)))
    logits = torch.zeros(2, 40)
    allow_only(logits, masks.sampled_rows, mask_bits(masks, 40))
    assert logits.isfinite().nonzero().tolist() == [[0, 3], [0, 31], [1, 3], [1, 39]]


def test_what_is_allowed_anyway_is_drawn_as_ever_with_the_models_logprobs():
    """Same seed and number: a mask that allows all, or all that could be drawn, changes nothing."""
    sampler, logits = Sampler(resolve_ops("cpu")), torch.randn(3, 50)
    params = SamplingParams(num_logprobs=2, top_k=4)
    works = [SampleWork(params, seed=i, num_generated=7) for i in range(3)]
    plain = tokens_of(sampler, logits, works)
    best = [set(row.topk(4).indices.tolist()) for row in logits]
    for allowed in ([set(range(50))] * 3, best):
        masks = make_masks([0, 1, 2], allowed, 50)
        assert tokens_of(sampler, logits, works, partial(_same, masks)) == plain
    banned = [{*range(50)} - {token.token_id} for token in plain]
    masks = make_masks([0, 1, 2], banned, 50)
    other = tokens_of(sampler, logits, works, lambda: masks)
    for row, (before, after) in enumerate(zip(plain, other, strict=True)):
        assert before.token_id != after.token_id
        assert after.logprob is not None
        log_probs = logits[row].log_softmax(0)
        assert after.logprob.logprob == pytest.approx(log_probs[after.token_id].item(), abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0])
def test_where_a_grammar_ends_an_answer_may_be_shorter_than_it_should(temperature: float):
    """min_tokens bans end token 5, but the grammar allows nothing else."""
    params = SamplingParams(temperature=temperature, grammar=Grammar("regex", "x"))
    work = SampleWork(params, seed=1, num_generated=0, banned_ids=(5,))
    sampler = Sampler(resolve_ops("cpu"))
    for allowed, expected in (({5}, {5}), ({5, 9}, {9})):
        masks = make_masks([0], [allowed], 40)
        (token,) = tokens_of(sampler, torch.randn(1, 40), [work], partial(_same, masks))
        assert token.is_finite
        assert {token.token_id} == expected


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 7, 300])
def test_a_gpu_allows_the_same(num_rows: int):
    vocab = 154880
    generator = torch.Generator().manual_seed(num_rows)
    logits = torch.randn(num_rows, vocab, generator=generator)
    bits = torch.randint(-(2**31), 2**31, (num_rows, vocab // 32), generator=generator).int()
    rows = tuple(range(num_rows))
    on_gpu = logits.cuda()
    allow_only(logits, rows, bits)
    allow_only(on_gpu, rows, bits)
    assert torch.equal(on_gpu.cpu(), logits)
