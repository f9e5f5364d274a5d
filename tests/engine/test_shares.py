"""What a step gave reaches its API processes whole and in order, plain tokens in columns."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from tests.engine.fakes import (
    FakeRunner,
    expected_output,
    make_limits,
    make_request,
    make_scheduler,
)
from tetrad.core.messages import EngineStats, StepOutputs
from tetrad.core.request import RequestOutput, TokenLogprob
from tetrad.engine.engine import Engine
from tetrad.engine.gains import StepGain
from tetrad.engine.shares import MOST_LOGPROBS, Shares
from tetrad.engine.wire import decode, encode, plain_tokens

STATS = EngineStats()
WAYS = [{}, {"continuous_steps": 5}, {"overlap": False, "stream_interval": 3}]


def test_columns_that_do_not_fit_are_no_message():
    with pytest.raises(ValueError, match="columns of 4 and 8 bytes"):
        plain_tokens(StepOutputs([], STATS, bytes(4), bytes(8)))


def test_each_gets_its_own_and_all_get_the_figures():
    shares = Shares()
    shares.begin(replace(make_request("a"), worker=1))
    output = RequestOutput("a", (1,))
    numbers, token_ids = np.array([2**32 - 1, 7, 8]), np.array([2**31 - 1, 4, 5])
    gain = StepGain([output], token_ids, numbers, np.array([0, 2, 0]))
    messages = dict(shares.messages(gain, {0, 1, 2}, STATS))
    assert [messages[worker].outputs for worker in range(3)] == [[], [output], []]
    columns = [list(plain_tokens(messages[worker])) for worker in range(3)]
    assert columns == [[(2**32 - 1, 2**31 - 1), (8, 5)], [], [(7, 4)]]
    assert all(message.stats == STATS for message in messages.values())


def test_many_log_probabilities_are_told_in_messages_that_are_soon_read():
    top = tuple((token_id, -1.0) for token_id in range(20))
    outputs = [
        RequestOutput(str(number), (1,), (TokenLogprob(1, -1.0, top),)) for number in range(500)
    ]
    gain = StepGain(outputs, np.array([4]), np.array([7]), np.array([0]))
    messages = [message for _, message in Shares().messages(gain, {0}, STATS)]
    assert [output for message in messages for output in message.outputs] == outputs
    assert [list(plain_tokens(message)) for message in messages] == [[(7, 4)], [], []]
    assert all(21 * len(message.outputs) < MOST_LOGPROBS + 21 for message in messages)


@pytest.mark.parametrize("how", WAYS)
def test_whatever_the_steps_each_request_gets_its_tokens_in_order(how: dict[str, int]):
    """Requests of two API processes, some preempted on the way. What a token in a column does not
    say is as it was told before."""
    scheduler = make_scheduler(make_limits(9, running=6, step=96))
    engine = Engine(scheduler, FakeRunner(9), **how)  # type: ignore[arg-type]
    shares = Shares()
    wanted = {}
    for number in range(8):
        seed = number % 3
        penalty = 1.2 if number == 5 else 1.0
        request = make_request(
            f"r{number}", 20 + number, 90, seed=seed, repetition_penalty=penalty, ignore_eos=False
        )
        request = wanted[number] = replace(request, number=number, worker=number % 2)
        engine.add(request)
        shares.begin(request)
    got: dict[int, list[int]] = {number: [] for number in wanted}
    told: dict[int, int] = {}
    num_plain = 0
    while engine.has_work:
        gains = engine.step()
        if scheduler.counters.generated_tokens > 60 and not scheduler.counters.preemptions:
            scheduler._preempt_last()
            scheduler.counters.preemptions += 1
        for gain in gains.steps:
            for worker, sent in shares.messages(gain, {0, 1}, STATS):
                message = decode(encode(sent))
                assert isinstance(message, StepOutputs)
                for number, token in plain_tokens(message):
                    assert (number % 2, number in told) == (worker, True)
                    got[number].append(token)
                    num_plain += 1
                for output in message.outputs:
                    number = int(output.rid[1:])
                    assert number % 2 == worker
                    got[number] += output.token_ids
                    told[number] = output.num_preemptions
    for number, request in wanted.items():
        assert got[number] == expected_output(request, number % 3)
    assert scheduler.counters.preemptions >= 1
    assert max(told.values()) >= 1
    assert (num_plain > 100) == ("stream_interval" not in how)
    assert shares.of(0) == shares.of(1) == []
