"""The official client library against the server, over a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.server.fake_engine import FakeEngine, saying
from tests.server.sdk import exhaust, openai_sdk, script
from tetrad.server.text.tokenizer import Tokenizer

MESSAGES: Any = [{"role": "user", "content": "What is 3+5?"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "parameters": {"properties": {"expression": {"type": "string"}}},
        },
    }
]


@pytest.fixture
async def sdk(address: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai_sdk(address) as sdk:
        yield sdk


async def test_models(sdk: openai.AsyncOpenAI):
    assert [model.id async for model in sdk.models.list()] == ["abacus"]
    assert (await sdk.models.retrieve("abacus")).id == "abacus"


async def test_chat_whole_and_streamed(
    sdk: openai.AsyncOpenAI, engine: FakeEngine, tokenizer: Tokenizer
):
    script(engine, tokenizer, "three plus five</think>3 + 5 = 8")
    whole = await sdk.chat.completions.create(model="abacus", messages=MESSAGES)
    assert whole.choices[0].message.content == "3 + 5 = 8"
    assert whole.choices[0].message.model_dump()["reasoning_content"] == "three plus five"
    assert whole.usage is not None
    assert whole.usage.completion_tokens_details is not None
    stream = await sdk.chat.completions.create(
        model="abacus",
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"top_k": 5, "chat_template_kwargs": {"enable_thinking": True}},
    )
    text, usage = "", None
    async for chunk in stream:
        usage = chunk.usage
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    assert text == "3 + 5 = 8"
    assert usage == whole.usage
    assert engine.seen[-1].sampling.top_k == 5


async def test_its_stream_helper_puts_tool_calls_together(
    sdk: openai.AsyncOpenAI, engine: FakeEngine, tokenizer: Tokenizer
):
    call = "<tool_call>calculator<arg_key>expression</arg_key><arg_value>{}</arg_value></tool_call>"
    script(engine, tokenizer, "</think>" + call.format("3+5") + call.format("é"))
    async with sdk.chat.completions.stream(
        model="abacus", messages=MESSAGES, tools=TOOLS, n=2
    ) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    for choice in final.choices:
        assert choice.finish_reason == "tool_calls"
        calls: Any = choice.message.tool_calls
        assert [c.function.arguments for c in calls] == [
            '{"expression": "3+5"}',
            '{"expression": "é"}',
        ]
        assert len({c.id for c in calls}) == 2


async def test_completions_with_logprobs(sdk: openai.AsyncOpenAI):
    answer = await sdk.completions.create(
        model="abacus", prompt=["3+5", "é"], logprobs=1, max_tokens=20
    )
    assert [choice.text for choice in answer.choices] == ["3+5", "é"]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["3", "+", "5"]
    chat = await sdk.chat.completions.create(
        model="abacus", messages=MESSAGES, logprobs=True, top_logprobs=2, n=2, max_tokens=3
    )
    for choice in chat.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [len(token.top_logprobs) for token in choice.logprobs.content] == [2, 2, 2]


async def test_errors_become_its_exceptions(sdk: openai.AsyncOpenAI, engine: FakeEngine):
    with pytest.raises(openai.BadRequestError, match="less than or equal to 100") as bad:
        await sdk.chat.completions.create(model="abacus", messages=MESSAGES, temperature=1000)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        await sdk.chat.completions.create(model="gpt-4", messages=MESSAGES)
    engine.script, engine.step_s = saying([18]), 0.02
    stream = await sdk.chat.completions.create(
        model="abacus",
        messages=MESSAGES,
        stream=True,
        max_tokens=200,
        extra_body={"ignore_eos": True},
    )
    chunks = aiter(stream)
    await anext(chunks)
    engine.kill("The engine ran out of luck.")
    with pytest.raises(openai.APIError, match="out of luck"):
        await exhaust(chunks)
    with pytest.raises(openai.InternalServerError, match="out of luck"):
        await sdk.chat.completions.create(model="abacus", messages=MESSAGES)
