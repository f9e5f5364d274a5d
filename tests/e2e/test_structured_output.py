"""Constrained answers from the real server, by the real `openai` client, many side by side."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.e2e.conftest import Served

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "result": {"type": "integer", "minimum": 0, "maximum": 999},
        "unit": {"enum": ["cm", "inch"]},
        "note": {"type": "string", "maxLength": 8},
        "steps": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["result", "unit", "note", "steps"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "sum", "strict": True, "schema": SCHEMA}}
PARAMETERS = {
    "type": "object",
    "properties": {"expression": {"type": "string", "maxLength": 12}},
    "required": ["expression"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
    for name in ("calculator", "abacus")
]
OFF = {"chat_template_kwargs": {"enable_thinking": False}}
NUM_REQUESTS, NUM_CONCURRENT = 100, 32


@pytest.fixture
async def client(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


async def ask(client: openai.AsyncOpenAI, number: int, **fields: Any) -> dict[str, str | None]:
    """content, reasoning, name and arguments of a call, finish; streamed or not, it is the same."""
    asked: dict[str, Any] = {
        "model": "abacus",
        "messages": [{"role": "user", "content": f"What is {number}+5?"}],
        "max_tokens": 400,
        "temperature": (0.0, 1.0)[number % 2],
        "seed": number,
    } | fields
    if not asked.get("stream"):
        (choice,) = (await client.chat.completions.create(**asked)).choices
        call = (choice.message.tool_calls or [None])[0]
        return {
            "content": choice.message.content,
            "reasoning": choice.message.reasoning_content,
            "name": call and call.function.name,
            "arguments": call and call.function.arguments,
            "finish": choice.finish_reason,
        }
    found: dict[str, str] = dict.fromkeys(("content", "reasoning", "name", "arguments"), "")
    finish = None
    async for chunk in await client.chat.completions.create(**asked):
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            found["content"] += choice.delta.content or ""
            found["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            for piece in choice.delta.tool_calls or ():
                if piece.index == 0:
                    found["name"] += piece.function.name or ""
                    found["arguments"] += piece.function.arguments or ""
    return {name: text or None for name, text in found.items()} | {"finish": finish}


def check_json(text: str | None) -> None:
    answer = json.loads(text or "")
    assert set(answer) == set(SCHEMA["properties"])
    assert 0 <= answer["result"] <= 999
    assert answer["unit"] in ("cm", "inch")
    assert len(answer["note"]) <= 8
    assert len(answer["steps"]) <= 3
    assert all(isinstance(step, bool) for step in answer["steps"])


async def one(client: openai.AsyncOpenAI, number: int) -> None:
    """A JSON answer with or without reasoning, streamed or not; among them others of all kinds."""
    stream = {"stream": True} if number // 2 % 2 else {}
    thinking = {"extra_body": OFF} if number // 4 % 2 else {}
    answer = await ask(client, number, response_format=FORMAT, **stream, **thinking)
    assert answer["finish"] == "stop", answer
    check_json(answer["content"])
    assert (answer["reasoning"] is None) == bool(thinking)


async def another(client: openai.AsyncOpenAI, number: int) -> None:
    """What runs beside it."""
    stream = {"stream": True} if number // 2 % 2 else {}
    match number % 4:
        case 0:
            answer = await ask(client, number, tools=TOOLS, tool_choice="required", **stream)
            assert answer["name"] in ("calculator", "abacus")
        case 1:
            named = {"type": "function", "function": {"name": "abacus"}}
            answer = await ask(client, number, tools=TOOLS, tool_choice=named, **stream)
            assert answer["name"] == "abacus"
        case 2:
            body = {"extra_body": {"regex": "[0-9]{3}-[a-c]x"} | OFF}
            answer = await ask(client, number, **body, **stream)
            assert re.fullmatch("[0-9]{3}-[a-c]x", answer["content"] or "")
            return
        case _:
            answer = await ask(client, number, max_tokens=30, **stream)
            assert answer["name"] is None
            return
    assert answer["finish"] == "tool_calls", answer
    arguments = json.loads(answer["arguments"] or "")
    assert set(arguments) == {"expression"}


async def test_a_hundred_of_a_hundred_are_valid_while_others_run_beside(
    client: openai.AsyncOpenAI, served: Served
):
    gate = asyncio.Semaphore(NUM_CONCURRENT)

    async def run(work: Any, number: int) -> None:
        async with gate:
            await work(client, number)

    works = [run(one, number) for number in range(NUM_REQUESTS)]
    works += [run(another, number) for number in range(NUM_REQUESTS // 4)]
    await asyncio.gather(*works)
    assert served.wait_idle()["integrity"] == "ok"


async def test_an_unconstrained_answer_is_the_same_beside_constrained_ones(
    client: openai.AsyncOpenAI,
):
    """Greedy, alone and among others; and where a grammar allows all, with it."""
    alone = await ask(client, 12)
    beside, *_ = await asyncio.gather(
        ask(client, 12), *(one(client, number) for number in range(6)), ask(client, 12)
    )
    anything = await ask(client, 12, extra_body={"regex": r"[\s\S]*"})
    assert beside == alone == anything


async def test_a_limit_cuts_and_says_so(client: openai.AsyncOpenAI):
    answer = await ask(client, 1, response_format=FORMAT, max_tokens=6, extra_body=OFF)
    assert answer["finish"] == "length"
    assert (answer["content"] or "").startswith("{")


async def test_what_cannot_be_followed_is_refused_before_any_stream_starts(
    client: openai.AsyncOpenAI,
):
    bad = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "strng"}}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="strng"):
            await ask(client, 1, response_format=bad, stream=stream)
    for text in ('root ::= root root | "a" | [a-z]', "root ::= gone"):
        with pytest.raises(openai.BadRequestError, match="ebnf cannot be used"):
            await ask(client, 1, extra_body={"ebnf": text})


async def test_the_choices_of_a_prompt_follow_the_grammar_each(client: openai.AsyncOpenAI):
    answer = await client.chat.completions.create(
        model="abacus",
        messages=[{"role": "user", "content": "What is 3+5?"}],
        n=4,
        seed=1,
        temperature=1.5,
        logprobs=True,
        top_logprobs=2,
        extra_body={"guided_choice": ["yes", "no", "maybe"]} | OFF,
    )
    for choice in answer.choices:
        assert choice.message.content in ("yes", "no", "maybe")
        assert choice.logprobs is not None
        assert "".join(entry.token for entry in choice.logprobs.content or ()) == (
            choice.message.content
        )
