"""The official client library's responses against the server, over a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.sdk import REASON_TEXT_CALL, openai_sdk, script
from tetrad.server.text.tokenizer import Tokenizer

TOOLS: Any = [
    {
        "type": "function",
        "name": "calculator",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        "strict": False,
    }
]


@pytest.fixture
async def sdk(address: str, engine: FakeEngine) -> AsyncIterator[openai.AsyncOpenAI]:
    engine.info["context_length"] = 1000
    async with openai_sdk(address) as sdk:
        yield sdk


async def test_a_response_whole_and_streamed(
    sdk: openai.AsyncOpenAI, engine: FakeEngine, tokenizer: Tokenizer
):
    script(engine, tokenizer, REASON_TEXT_CALL)
    fields: Any = {"model": "abacus", "input": "What is 3+5?", "tools": TOOLS}
    whole = await sdk.responses.create(**fields)
    assert whole.output_text == "Well."
    kinds = []
    async with sdk.responses.stream(**fields) as stream:
        async for event in stream:
            kinds.append(event.type)
        final = await stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert {"response.reasoning_text.delta", "response.function_call_arguments.done"} <= set(kinds)
    for response in (whole, final):
        assert response.status == "completed"
        reasoning, message, call = (item.model_dump() for item in response.output)
        assert reasoning["content"] == [{"type": "reasoning_text", "text": "use it"}]
        assert message["content"][0]["text"] == "Well."
        assert call["arguments"] == '{"expression": "é+5"}'
        assert response.usage is not None
        assert response.usage.input_tokens_details.cached_tokens == 3
    assert final.usage == whole.usage


async def test_a_conversation_goes_on_both_ways(
    sdk: openai.AsyncOpenAI, engine: FakeEngine, tokenizer: Tokenizer
):
    """By what the client sends back, and by what the server has kept."""
    script(engine, tokenizer, REASON_TEXT_CALL)
    first = await sdk.responses.create(model="abacus", input="What is 3+5?", tools=TOOLS)
    call = first.output[-1]
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "8"}
    question = {"role": "user", "content": "What is 3+5?"}
    script(engine, tokenizer, "</think>8")
    sent: Any = [question, *(item.model_dump() for item in first.output), result]
    await sdk.responses.create(model="abacus", input=sent, tools=TOOLS)
    await sdk.responses.create(
        model="abacus", input=[result], previous_response_id=first.id, tools=TOOLS
    )
    assert engine.seen[1].prompt_ids == engine.seen[2].prompt_ids
    assert "<tool_response>8" in tokenizer.decode(engine.seen[1].prompt_ids)


async def test_what_is_kept(sdk: openai.AsyncOpenAI, engine: FakeEngine):
    response = await sdk.responses.create(model="abacus", input="3")
    assert await sdk.responses.retrieve(response.id) == response
    await sdk.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError, match="There is no response"):
        await sdk.responses.retrieve(response.id)
    engine.gate.clear()
    begun = await sdk.responses.create(model="abacus", input="3", background=True)
    assert begun.status == "in_progress"
    assert (await sdk.responses.cancel(begun.id)).status == "cancelled"


async def test_errors_become_its_exceptions(sdk: openai.AsyncOpenAI):
    with pytest.raises(openai.BadRequestError, match="There is no response") as bad:
        await sdk.responses.create(model="abacus", input="3", previous_response_id="resp_0")
    assert bad.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        await sdk.responses.create(model="gpt-5", input="3")
