"""What a step gave reaches its API processes whole and in order, plain tokens in columns."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.fakes import make_request
from tetrad.core.messages import EngineStats, StepOutputs
from tetrad.core.request import Finish, RequestOutput, TokenLogprob
from tetrad.engine.shares import Shares
from tetrad.engine.wire import decode, encode, plain_tokens

STATS = EngineStats()
PLAIN: dict[str, Any] = {"prompt_tokens": 9, "cached_tokens": 3, "num_preemptions": 1}
FIRST = RequestOutput("a", (1,), queue_s=0.5, **PLAIN)


def begun(*rids: str, worker: int = 0) -> Shares:
    shares = Shares()
    for number, rid in enumerate(rids, 7):
        shares.begin(replace(make_request(rid, 9), number=number), worker)
    return shares


def sent(shares: Shares, outputs: list[RequestOutput]) -> StepOutputs:
    ((_, message),) = shares.messages(outputs, {0}, STATS)
    received = decode(encode(message))
    assert isinstance(received, StepOutputs)
    return received


def test_a_token_of_which_all_else_is_known_is_a_number():
    shares = begun("a", "b")
    first = [FIRST, RequestOutput("b", (2,), **PLAIN)]
    assert sent(shares, first) == StepOutputs(first, STATS)
    message = sent(shares, [RequestOutput("b", (2**31 - 1,), **PLAIN)])
    assert message.outputs == []
    assert list(plain_tokens(message)) == [(8, 2**31 - 1)]


@pytest.mark.parametrize(
    "output",
    [
        RequestOutput("a", (2,), finish=Finish("length"), **PLAIN),
        RequestOutput("a", (2, 3), **PLAIN),
        RequestOutput("a", (), **PLAIN),
        RequestOutput("a", (2,), (TokenLogprob(2, -1.0),), **PLAIN),
        RequestOutput("a", (2,), **PLAIN | {"num_preemptions": 2}),
        RequestOutput("a", (2,), **PLAIN | {"cached_tokens": 4}),
        RequestOutput("a", (2,), queue_s=0.1, **PLAIN),
        RequestOutput("stranger", (2,), **PLAIN),
    ],
    ids=str,
)
def test_what_is_more_travels_in_full(output: RequestOutput):
    shares = begun("a")
    sent(shares, [FIRST])
    assert sent(shares, [output]) == StepOutputs([output], STATS)


def test_nothing_overtakes_what_is_told_in_full():
    """Of one request in one message: columns are read first."""
    shares = begun("a")
    second = RequestOutput("a", (2,), **PLAIN)
    assert sent(shares, [FIRST, second]).outputs == [FIRST, second]
    message = sent(shares, [second, RequestOutput("a", (3,), finish=Finish("length"), **PLAIN)])
    assert list(plain_tokens(message)) == [(7, 2)]
    assert [output.token_ids for output in message.outputs] == [(3,)]


def test_columns_that_do_not_fit_are_no_message():
    with pytest.raises(ValueError, match="columns of 4 and 8 bytes"):
        plain_tokens(StepOutputs([], STATS, bytes(4), bytes(8)))


def test_whatever_the_steps_each_request_gets_its_tokens_in_order():
    """Random steps of requests of two API processes, several outputs of one in a message."""
    drawn = random.Random(1)
    shares = Shares()
    owners = {"a": 0, "b": 1, "c": 1}
    for number, (rid, worker) in enumerate(owners.items()):
        shares.begin(replace(make_request(rid, 9), number=number), worker)
    expected: dict[str, list[int]] = {rid: [] for rid in owners}
    got: dict[str, list[int]] = {rid: [] for rid in owners}
    for step in range(200):
        outputs = []
        for rid in drawn.choices(list(owners), k=drawn.randrange(5)):
            tokens = tuple(drawn.randrange(1000) for _ in range(drawn.choice((1, 1, 1, 1, 2))))
            expected[rid] += tokens
            outputs.append(RequestOutput(rid, tokens, prompt_tokens=9, num_preemptions=step // 50))
        for worker, message in shares.messages(outputs, {0, 1}, STATS):
            for number, token in plain_tokens(message):
                rid = list(owners)[number]
                assert owners[rid] == worker
                got[rid].append(token)
            for output in message.outputs:
                assert owners[output.rid] == worker
                got[output.rid] += output.token_ids
    assert got == expected
