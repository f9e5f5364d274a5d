"""Each rule against a row-by-row reference in plain Python."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.fakes import Token, tokens_of
from tetrad.core.request import SamplingParams, TokenLogprob
from tetrad.core.step import SampleWork
from tetrad.engine.sampler import Sampler, apply_rules
from tetrad.kernels.select import resolve_ops

VOCAB = 12
SAMPLER = Sampler(resolve_ops("cpu"))


def make_work(
    seed: int = 0,
    num_generated: int = 0,
    history: tuple[int, ...] = (),
    num_prompt: int = 0,
    banned: tuple[int, ...] = (),
    **params: Any,
) -> SampleWork:
    return SampleWork(SamplingParams(**params), seed, num_generated, history, num_prompt, banned)


def sample(logits: torch.Tensor, *works: SampleWork, num_decodes: int = 0) -> list[Token]:
    return tokens_of(SAMPLER, logits, works, num_decodes=num_decodes)


def reference_rules(row: list[float], work: SampleWork) -> list[float]:
    params, output = work.params, work.history_ids[work.num_prompt :]
    row = [x + params.logit_bias.get(i, 0.0) for i, x in enumerate(row)]
    for i in range(len(row)):
        if i in work.history_ids:
            penalty = params.repetition_penalty
            row[i] = row[i] / penalty if row[i] > 0 else row[i] * penalty
        if i in output:
            row[i] -= params.presence_penalty + params.frequency_penalty * output.count(i)
        if i in work.banned_ids:
            row[i] = -math.inf
    return row


token = st.integers(0, VOCAB - 1)
works = st.builds(
    make_work,
    history=st.lists(token, max_size=20).map(tuple),
    num_prompt=st.integers(0, 10),
    banned=st.lists(token, max_size=3).map(tuple),
    logit_bias=st.dictionaries(token, st.floats(-100, 100), max_size=4),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
    presence_penalty=st.sampled_from([0.0, -2.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.3]),
)


@given(st.lists(works, min_size=1, max_size=5), st.integers(0, 2**31))
@settings(max_examples=100, deadline=None)
def test_rules_do_what_a_plain_loop_does(works: list[SampleWork], seed: int):
    logits = torch.randn(len(works), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    expected = [
        reference_rules(row, work) for row, work in zip(logits.tolist(), works, strict=True)
    ]
    apply_rules(logits, 0, works)
    torch.testing.assert_close(logits, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_presence_and_frequency_look_at_the_output_only():
    logits = torch.zeros(1, VOCAB)
    work = make_work(
        history=(1, 1, 2, 2, 3), num_prompt=2, presence_penalty=1.0, frequency_penalty=0.5
    )
    apply_rules(logits, 0, [work])
    assert logits[0, :4].tolist() == [0.0, 0.0, -2.0, -1.5]


def test_greedy_takes_the_lowest_of_equals():
    logits = torch.zeros(2, VOCAB)
    logits[0, 5] = logits[0, 3] = 1.0
    cold = make_work(temperature=0.0)
    assert [s.token_id for s in sample(logits, cold, cold)] == [3, 0]


def test_a_tiny_temperature_is_greedy():
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0)) * 50
    (got,) = sample(logits, make_work(temperature=1e-38))
    assert got.token_id == int(logits.argmax())


def test_a_seed_gives_the_same_tokens_whatever_the_batch():
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(1))
    alone = [sample(logits, make_work(9, n))[0].token_id for n in range(40)]
    others = [make_work(seed, 3, temperature=0.5, top_k=4) for seed in range(6)]
    crowd = torch.randn(7, 200, generator=torch.Generator().manual_seed(2))
    crowd[4] = logits[0]
    together = [
        sample(crowd, *others[:4], make_work(9, n), *others[4:])[4].token_id for n in range(40)
    ]
    assert together == alone
    assert len(set(alone)) > 20
    assert [sample(logits, make_work(10, n))[0].token_id for n in range(40)] != alone


plain = st.builds(
    make_work,
    seed=st.integers(0, 2**64 - 1),
    num_generated=st.integers(0, 2**36),
    temperature=st.sampled_from([0.0, 1e-38, 0.5, 1.0]),
    top_p=st.sampled_from([1.0, 0.5, 1e-300]),
    top_k=st.sampled_from([0, 1, 5]),
    min_p=st.sampled_from([0.0, 0.3]),
)


@given(st.lists(plain, min_size=1, max_size=6), st.lists(works, max_size=3), st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_columns_give_the_tokens_of_structs(
    decodes: list[SampleWork], others: list[SampleWork], seed: int
):
    every = [*decodes, *others]
    logits = torch.randn(len(every), VOCAB, generator=torch.Generator().manual_seed(seed))
    logits[seed % len(every), 3] = math.nan
    assert sample(logits, *every, num_decodes=len(decodes)) == sample(logits, *every)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.5}, [0, 1]),
        ({"min_p": 0.3}, [0, 1, 2]),
        ({"temperature": 0.5}, [0, 1, 2, 3]),
        ({"logit_bias": {0: -100.0}}, [1, 2, 3]),
    ],
)
def test_frequencies_follow_the_distribution(params: dict[str, Any], kept: list[int]):
    """Chi-square over 4000 draws of fixed seeds; 16.3 is its 99.9 % point for 3 degrees."""
    probabilities = [0.4, 0.3, 0.2, 0.1]
    temperature = params.get("temperature", 1.0)
    weights = [p ** (1 / temperature) if i in kept else 0.0 for i, p in enumerate(probabilities)]
    num_draws = 4000
    logits = torch.tensor(probabilities).log().repeat(num_draws, 1)
    drawn = sample(logits, *(make_work(123, n, **params) for n in range(num_draws)))
    counts = [sum(s.token_id == i for s in drawn) for i in range(4)]
    expected = [num_draws * w / sum(weights) for w in weights]
    assert [i for i in range(4) if counts[i]] == kept
    assert sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True) if e) < 16.3


def test_log_probabilities_are_of_the_unmodified_distribution():
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(3))
    truth = logits.log_softmax(dim=1)
    best = truth[0].topk(3)
    results = sample(
        logits,
        make_work(temperature=0.0, num_logprobs=3, banned=(int(best.indices[0]),)),
        make_work(temperature=0.0),
        make_work(temperature=0.0, num_logprobs=0, logit_bias={4: 50.0}),
    )
    second = int(best.indices[1])
    assert results[0].token_id == second
    assert results[0].logprob is not None
    assert results[0].logprob.logprob == pytest.approx(float(truth[0, second]))
    assert [i for i, _ in results[0].logprob.top] == best.indices.tolist()
    assert [p for _, p in results[0].logprob.top] == pytest.approx(best.values.tolist())
    assert results[1].logprob is None
    assert results[2].logprob is not None
    assert results[2].logprob == TokenLogprob(4, results[2].logprob.logprob, ())
    assert results[2].logprob.logprob == pytest.approx(float(truth[2, 4]))


def test_more_logprobs_than_tokens_gives_them_all():
    (got,) = sample(torch.zeros(1, VOCAB), make_work(num_logprobs=50))
    assert got.logprob is not None
    assert len(got.logprob.top) == VOCAB


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_is_marked_and_the_others_go_on(bad: float, temperature: float):
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4))
    work = make_work(temperature=temperature, num_logprobs=2)
    healthy = sample(logits, work, work, work)
    logits[1, 7] = bad
    got = sample(logits, work, work, work)
    assert got[1] == Token(-1, None)
    assert (got[0], got[2]) == (healthy[0], healthy[2])


def test_no_rows_no_tokens():
    assert sample(torch.zeros(0, VOCAB)) == []


anything_allowed = st.builds(
    make_work,
    seed=st.integers(0, 2**63 - 1),
    num_generated=st.integers(0, 10**6),
    history=st.lists(token, max_size=20).map(tuple),
    banned=st.lists(token, max_size=VOCAB - 1).map(tuple),
    logit_bias=st.dictionaries(token, st.floats(-100, 100)),
    temperature=st.floats(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, 2**31 - 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.01, 100),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    num_logprobs=st.none() | st.integers(0, 20),
)


@given(st.lists(anything_allowed, min_size=1, max_size=4), st.floats(0, 1e4))
@settings(max_examples=300, deadline=None)
def test_whatever_the_door_lets_in_gets_a_token(works: list[SampleWork], size: float):
    logits = torch.randn(len(works), VOCAB, generator=torch.Generator().manual_seed(5)) * size
    for token, work in zip(sample(logits, *works), works, strict=True):
        assert token.is_finite
        assert 0 <= token.token_id < VOCAB
        assert token.token_id not in work.banned_ids


@pytest.mark.parametrize("top_p", [1e-300, 5e-324, 1e-45, 1e-9])
def test_a_tiny_top_p_keeps_the_best_token(top_p: float):
    logits = torch.arange(VOCAB).float().unsqueeze(0)
    (token,) = sample(logits, make_work(top_p=top_p))
    assert token.token_id == VOCAB - 1


@pytest.mark.parametrize("penalty", [0.0, 1e-300, math.nan])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rules_that_spoil_a_row_end_that_request_alone(penalty: float, temperature: float):
    """The door refuses such penalties; if one came through, the engine must not die of it."""
    spoiled = make_work(history=(1, 2), repetition_penalty=penalty, temperature=temperature)
    nothing_left = make_work(banned=tuple(range(VOCAB)), temperature=temperature)
    sound = make_work(temperature=0.0)
    logits = torch.arange(VOCAB).float().repeat(3, 1)
    first, second, third = sample(logits, spoiled, sound, nothing_left)
    assert (first.is_finite, third.is_finite) == (False, False)
    assert (second.token_id, second.is_finite) == (VOCAB - 1, True)
