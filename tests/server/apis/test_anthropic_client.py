"""Anthropic's client library against the server, over a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from tests.server.fake_engine import FakeEngine, saying
from tests.server.sdk import REASON_TEXT_CALL, exhaust, script
from tetrad.server.text.tokenizer import Tokenizer

MESSAGES: Any = [{"role": "user", "content": "What is 3+5?"}]
TOOLS: Any = [
    {
        "name": "calculator",
        "input_schema": {"type": "object", "properties": {"expression": {"type": "string"}}},
    }
]


@pytest.fixture
async def sdk(address: str, engine: FakeEngine) -> AsyncIterator[anthropic.AsyncAnthropic]:
    engine.info["context_length"] = 10_000
    async with anthropic.AsyncAnthropic(
        base_url=address, api_key="none", max_retries=0, timeout=30
    ) as sdk:
        yield sdk


async def test_a_message_whole_and_streamed(
    sdk: anthropic.AsyncAnthropic, engine: FakeEngine, tokenizer: Tokenizer
):
    script(engine, tokenizer, REASON_TEXT_CALL)
    fields: Any = {"model": "abacus", "max_tokens": 99, "messages": MESSAGES, "tools": TOOLS}
    whole = await sdk.messages.create(**fields)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    kinds = []
    async with sdk.messages.stream(**fields) as stream:
        async for event in stream:
            kinds.append(event.type)
        final = await stream.get_final_message()
    assert {"thinking", "text", "input_json", "content_block_stop", "message_stop"} <= set(kinds)
    for message in (whole, final):
        thinking, text, call = (block.model_dump() for block in message.content)
        assert thinking["thinking"] == "use it"
        assert text["text"] == "Well."
        assert call["input"] == {"expression": "é+5"}
        assert message.stop_reason == "tool_use"
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.usage.input_tokens == whole.usage.input_tokens


async def test_a_conversation_goes_on(
    sdk: anthropic.AsyncAnthropic, engine: FakeEngine, tokenizer: Tokenizer
):
    """What the client got is what it sends back."""
    script(engine, tokenizer, REASON_TEXT_CALL)
    first = await sdk.messages.create(model="abacus", max_tokens=99, messages=MESSAGES, tools=TOOLS)
    call = first.content[-1]
    assert call.type == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "8"}
    messages: Any = [
        *MESSAGES,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    script(engine, tokenizer, "</think>8")
    second = await sdk.messages.create(
        model="abacus", max_tokens=99, messages=messages, tools=TOOLS
    )
    assert second.stop_reason == "end_turn"
    prompt = tokenizer.decode(engine.seen[1].prompt_ids)
    assert "<arg_value>é+5</arg_value></tool_call><|observation|><tool_response>8" in prompt
    counted = await sdk.messages.count_tokens(model="abacus", messages=messages, tools=TOOLS)
    assert counted.input_tokens == len(engine.seen[1].prompt_ids)


async def test_errors_become_its_exceptions(sdk: anthropic.AsyncAnthropic, engine: FakeEngine):
    fields: Any = {"model": "abacus", "max_tokens": 99, "messages": MESSAGES}
    with pytest.raises(anthropic.BadRequestError, match="less than or equal to 100"):
        await sdk.messages.create(**fields, extra_body={"temperature": 1000})
    with pytest.raises(anthropic.NotFoundError, match="is not served here"):
        await sdk.messages.create(**fields | {"model": "claude"})
    engine.script, engine.step_s = saying([18]), 0.02
    stream = await sdk.messages.create(
        **fields | {"max_tokens": 500}, extra_body={"ignore_eos": True}, stream=True
    )
    await anext(stream)
    engine.kill("out of luck")
    with pytest.raises(anthropic.APIStatusError, match="out of luck"):
        await exhaust(stream)


async def test_models(sdk: anthropic.AsyncAnthropic):
    (model,) = [model async for model in sdk.models.list()]
    assert model == await sdk.models.retrieve("abacus")
    assert (model.id, model.display_name, model.type) == ("abacus", "abacus", "model")
    assert model.created_at.year > 2000
