"""Events that go from the engine's message straight to the connection are those that the task of
the request would have sent."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.server.apis.test_chat import ANSWER, CALL, TOOLS
from tests.server.conftest import until
from tests.server.fake_engine import FakeEngine, Step, saying
from tetrad.core.request import Finish, Request
from tetrad.server.http.connections import Body
from tetrad.server.service import Service
from tetrad.server.text.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "What is 3+5?"}]
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
STREAM: dict[str, Any] = {"stream": True}
LONG = "3 " * 60
"""More than a page of tokens: the choices after the first wait for it."""
TEXT = "One, two: äöü 🙂🙃 {\"three\": '\\n'}, four, five."
NUM_SLOW = 2000
"""Tokens for a slow reader: each event has all before it, so no buffer holds them."""

ANSWERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": (CHAT, {"messages": MESSAGES}, ANSWER),
    "chat with usage": (
        CHAT,
        {"messages": MESSAGES, "stream_options": {"include_usage": True}},
        ANSWER,
    ),
    "chat with running usage": (
        CHAT,
        {
            "messages": MESSAGES,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
        ANSWER,
    ),
    "chat with tools": (CHAT, {"messages": MESSAGES, "tools": TOOLS}, CALL),
    "chat with logprobs": (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}, TEXT),
    "choices of a chat": (CHAT, {"messages": MESSAGES, "n": 3, "seed": 1}, ANSWER),
    "completion": (COMPLETIONS, {"prompt": "3"}, TEXT),
    "echo": (COMPLETIONS, {"prompt": "3", "echo": True}, TEXT),
    "a stop string": (COMPLETIONS, {"prompt": "3", "stop": ["three", "nowhere"]}, TEXT),
    "logprobs": (COMPLETIONS, {"prompt": "3", "logprobs": 1}, TEXT),
    "choices of a long prompt": (COMPLETIONS, {"prompt": LONG, "n": 3}, TEXT),
    "prompts": (COMPLETIONS, {"prompt": [LONG, "4", LONG + "5"], "n": 2}, TEXT),
    "native": (GENERATE, {"text": "3"}, TEXT),
    "native choices": (GENERATE, {"text": "3", "sampling_params": {"n": 2}}, TEXT),
    "response": ("/v1/responses", {"input": "What is 3+5?"}, ANSWER),
    "message": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 99}, ANSWER),
    "message with tools": (
        "/v1/messages",
        {
            "messages": MESSAGES,
            "max_tokens": 99,
            "tools": [{"name": "calculator", "input_schema": {"type": "object"}}],
        },
        CALL,
    ),
}


class Written:
    """How many pieces went straight to the connection."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num = 0
        write = Body.write

        def counted(body: Body, piece: bytes) -> None:
            self.num += 1
            write(body, piece)

        monkeypatch.setattr(Body, "write", counted)


def by_choice(text: str) -> dict[Any, list[str]]:
    """The events of each choice: those of several may come in any order. What is drawn anew for
    each request is left out."""
    text = re.sub(r"(?<=_)[0-9a-f]{24,}|[0-9a-f]{32}", "ID", text)
    text = re.sub(r'"(e2e_latency|created|created_at|completed_at)":[0-9.e-]+', r'"\1":0', text)
    found: dict[Any, list[str]] = {}
    for event in text.split("\n\n"):
        index = re.search(r'"choices":\[{"index":(\d+)|"index":(\d+)}$', event)
        found.setdefault(index and index.groups(), []).append(event)
    return found


@pytest.mark.parametrize("name", ANSWERS)
async def test_both_ways_give_the_same_bytes(
    name: str,
    address: str,
    engine: FakeEngine,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
):
    route, fields, text = ANSWERS[name]
    engine.info["context_length"] = 4096
    engine.script = saying(tokenizer.encode(text, add_special_tokens=False))
    engine.step_s = 0.002
    written = Written(monkeypatch)
    answers = []
    async with httpx.AsyncClient(base_url=address) as client:
        for is_open in (True, False):
            if not is_open:
                monkeypatch.setattr(Body, "is_open", False)
            answer = await client.post(route, json=fields | STREAM | {"max_tokens": 99})
            assert answer.status_code == 200, answer.text
            answers.append(answer.text)
            assert (written.num > 0) == is_open
            written.num = 0
    straight, plain = map(by_choice, answers)
    assert straight == plain


async def test_a_slow_reader_gets_all_of_its_answer(
    address: str, engine: FakeEngine, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    """What comes while it does not read goes the long way, behind what went the short one."""
    engine.info["context_length"] = engine.info["max_total_tokens"] = 10**6
    engine.script = saying(tokenizer.encode("0123456789", add_special_tokens=False))
    engine.step_s = 1e-4
    written = Written(monkeypatch)
    parts = urlsplit(address)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, (parts.hostname, parts.port))
        sampling = {"max_new_tokens": NUM_SLOW, "ignore_eos": True}
        body = json.dumps(STREAM | {"text": "3", "sampling_params": sampling})
        head = f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        request = f"{head}Content-Length: {len(body)}\r\n\r\n{body}"
        await loop.sock_sendall(client, request.encode())
        num_before = 0
        while written.num != num_before or not num_before:
            num_before = written.num
            await asyncio.sleep(0.2)
        assert num_before < NUM_SLOW - 100, "it was never full"
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        answer = b""
        while piece := await loop.sock_recv(client, 1 << 16):
            answer += piece
    assert answer.endswith(b"0\r\n\r\n")
    texts = [json.loads(piece)["text"] for piece in re.findall(rb"(?m)^data: ({.*})", answer)]
    assert texts == [("0123456789" * NUM_SLOW)[: i + 1] for i in range(NUM_SLOW)]


async def test_time_that_is_up_is_told_behind_the_last_token(
    address: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    engine.script, engine.step_s = saying([18]), 0.01
    written = Written(monkeypatch)
    async with httpx.AsyncClient(base_url=address) as client:
        headers = {"X-Request-Timeout": "0.4"}
        fields = STREAM | {"prompt": "3", "max_tokens": 200, "ignore_eos": True}
        answer = await client.post(COMPLETIONS, json=fields, headers=headers)
    assert written.num > 10
    *pieces, last = [line for line in answer.text.split("\n\n") if line]
    assert all('"text":' in piece for piece in pieces)
    assert "was not finished within its 0.4 s" in last
    assert len(engine.aborted) == 1


async def test_what_fails_while_an_event_is_made_fails_its_request_only(
    address: str, engine: FakeEngine, service: Service, tokenizer: Tokenizer
):
    """Within the call from the engine's end, which others' tokens come by, too."""
    engine.step_s = 0.002

    def script(request: Request) -> list[Step]:
        spoiled = request.sampling.seed == 1
        bad = Step((18,), Finish("error", message="Logits were not finite.")) if spoiled else None
        return [Step((18,))] * 20 + [bad or Step((18,), Finish("length"))]

    engine.script = script
    fields = STREAM | {"prompt": "3", "max_tokens": 99}
    async with httpx.AsyncClient(base_url=address) as client:
        good, bad = await asyncio.gather(
            *(client.post(COMPLETIONS, json=fields | {"seed": seed}) for seed in (0, 1))
        )
    assert good.text.endswith("data: [DONE]\n\n")
    assert "Logits were not finite." in bad.text
    await until(lambda: service.open_requests == 0)
