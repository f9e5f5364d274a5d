"""An answer of no tokens: the prompt is computed, and nothing is said."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server.fake_engine import FakeEngine, saying
from tests.server.test_bad_input import sentence

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "3+5", "max_tokens": 0}),
    "echo": ("/v1/completions", {"prompt": "3+5", "max_tokens": 0, "echo": True}),
    "logprobs": ("/v1/completions", {"prompt": "3+5", "max_tokens": 0, "logprobs": 2}),
    "choices": ("/v1/completions", {"prompt": ["3+5", "4"], "max_tokens": 0, "n": 2}),
    "native": (
        "/generate",
        {"text": "3+5", "sampling_params": {"max_new_tokens": 0}, "return_logprob": True},
    ),
}


def answers(route: str, text: str, *, is_stream: bool) -> list[dict[str, Any]]:
    """Each choice, or each event of one."""
    lines = [line[6:] for line in text.split("\n\n")[:-2]] if is_stream else [text]
    values = [json.loads(line) for line in lines]
    return values if route == "/generate" else [c for value in values for c in value["choices"]]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("name", CASES)
async def test_nothing_is_said(
    client: httpx.AsyncClient, engine: FakeEngine, name: str, is_stream: bool
):
    """Also where the model's first token would have been its last."""
    route, fields = CASES[name]
    num_choices = 4 if name == "choices" else 1
    for script in (saying([18, 19]), saying([])):
        engine.script = script
        answer = await client.post(route, json=fields | {"stream": is_stream})
        assert answer.status_code == 200, answer.text
        found = answers(route, answer.text, is_stream=is_stream)
        assert [each["text"] for each in found] == ["3+5" if name == "echo" else ""] * num_choices
        if route == "/generate":
            (meta,) = [each["meta_info"] for each in found]
            assert meta["finish_reason"] == {"type": "length", "length": 0}
            assert (meta["completion_tokens"], meta["output_token_logprobs"]) == (0, [])
            assert meta["prompt_tokens"] == len(engine.seen[-1].prompt_ids)
        else:
            assert [each["finish_reason"] for each in found] == ["length"] * num_choices
    assert {request.sampling.max_new_tokens for request in engine.seen} == {1}


async def test_usage_counts_the_prompt_alone(client: httpx.AsyncClient):
    route, fields = CASES["completion"]
    usage = (await client.post(route, json=fields)).json()["usage"]
    assert usage["completion_tokens"] == 0
    assert usage["total_tokens"] == usage["prompt_tokens"] > 0


async def test_a_chat_has_something_to_say(client: httpx.AsyncClient):
    body = {"messages": [{"role": "user", "content": "3+5"}], "max_tokens": 0}
    assert "max_tokens" in sentence(await client.post("/v1/chat/completions", json=body))
    least = {"prompt": "3", "max_tokens": 0, "min_tokens": 1}
    assert "min_tokens is 1" in sentence(await client.post("/v1/completions", json=least))
