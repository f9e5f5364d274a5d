"""Every message survives the trip between the processes."""

from __future__ import annotations

import pytest

from tetrad.core import messages as m
from tetrad.core.request import Finish, Request, RequestOutput, SamplingParams, TokenLogprob
from tetrad.engine.wire import decode, encode

SAMPLING = SamplingParams(logit_bias={3: -1.5}, seed=2**63 - 1, stop_token_ids=(1, 2))
OUTPUT = RequestOutput(
    "a", (5,), (TokenLogprob(5, -0.25, ((5, -0.25), (1, -2.0))),), Finish("stop", 5), 10, 3, 1
)
EXAMPLES: list[m.Message] = [
    m.AddRequests([Request("a", (1, 2, 3), SAMPLING, worker=3)]),
    m.AbortRequests(["a", "b"]),
    m.Call(7, "state", 3),
    m.WorkerJoined(3),
    m.WorkerLeft(3),
    m.Shutdown(),
    m.EngineReady({"total_pages": 4, "backends": [{"op": "topk", "refusals": {}}]}),
    m.EngineProgress("weights", "1 GB"),
    m.RequestRefused("a", "too long", 400, "prompt"),
    m.StepOutputs([OUTPUT], m.EngineStats(running_requests=1), b"\1\0\0\0", b"\5\0\0\0"),
    m.Heartbeat(0.5, m.EngineStats()),
    m.LogSettings("debug", None),
    m.Reply(7, True, "done", {"n": 1}),
    m.EngineDied("out of memory", 5),
]


def test_every_message_class_has_an_example():
    assert {type(e).__name__ for e in EXAMPLES} == set(m.MESSAGES)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_decode_inverts_encode(message: m.Message):
    assert decode(encode(message)) == message


@pytest.mark.parametrize("frames", [[b"Nonsense", b"\x80"], [b"Shutdown"], [b"\xff\xfe", b""]])
def test_what_is_not_a_message_is_refused(frames: list[bytes]):
    with pytest.raises(ValueError, match="not a message"):
        decode(frames)
