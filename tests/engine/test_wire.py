"""Every message survives the trip between the processes."""

from __future__ import annotations

import msgspec
import pytest

from tests.engine.fakes import make_limits
from tetrad.core import messages as m
from tetrad.core.request import Finish, Request, RequestOutput, SamplingParams, TokenLogprob, packed
from tetrad.engine.wire import decode, encode

SAMPLING = SamplingParams(logit_bias={3: -1.5}, seed=2**63 - 1, stop_token_ids=(1, 2))
OUTPUT = RequestOutput(
    "a", (5,), (TokenLogprob(5, -0.25, ((5, -0.25), (1, -2.0))),), Finish("stop", 5), 10, 3, 1
)
EXAMPLES: list[m.Message] = [
    m.AddRequests([Request("a", packed((1, 2, 3)), SAMPLING, worker=3)]),
    m.AbortRequests(["a", "b"]),
    m.Call(7, "state", 3),
    m.WorkerJoined(3),
    m.WorkerLeft(3),
    m.Shutdown(),
    m.EngineReady({"total_pages": 4, "backends": [{"op": "topk", "refusals": {}}]}, make_limits()),
    m.EngineProgress("weights", "1 GB"),
    m.RequestRefused("a", "too long", 400, "prompt"),
    m.StepOutputs([OUTPUT], m.EngineStats(running_requests=1), b"\1\0\0\0", b"\5\0\0\0"),
    m.Heartbeat(0.5, m.EngineStats()),
    m.LogSettings("debug", None),
    m.Reply(7, True, "done", {"n": 1}),
    m.EngineDied("out of memory", 5),
]


def test_every_message_class_has_an_example():
    assert {type(e) for e in EXAMPLES} == set(m.Message.__subclasses__())


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_decode_inverts_encode(message: m.Message):
    assert decode(encode(message)) == message


@pytest.mark.parametrize("frame", [b"", b"\x80", b"\xff\xfe", encode(m.Shutdown())[:-1]])
def test_what_is_not_a_message_is_refused(frame: bytes):
    with pytest.raises(ValueError, match="not a message"):
        decode(frame)


def test_a_class_that_may_not_travel_is_refused():
    class Nonsense(msgspec.Struct, tag=True):
        pass

    with pytest.raises(ValueError, match=r"not a message: .*'Nonsense'"):
        decode(msgspec.msgpack.encode(Nonsense()))
