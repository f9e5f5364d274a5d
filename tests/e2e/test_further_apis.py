"""Anthropic's and OpenAI's further APIs by their real clients against the real server and model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel, Field

from tests.e2e.conftest import Served

QUESTION: Any = [{"role": "user", "content": "What is 3+5?"}]
LONG: Any = [{"role": "user", "content": "What is 3+5? " * 30}]
"""More than one page, so that it can come from the prefix cache."""


PARAMETERS = {
    "type": "object",
    "properties": {"expression": {"type": "string", "maxLength": 12}},
    "required": ["expression"],
}


class Sum(BaseModel):
    result: int = Field(ge=0, le=999)
    unit: Literal["cm", "inch"]


@pytest.fixture
def claude(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_every_api_gives_the_same_answer(claude: anthropic.Anthropic, client: openai.OpenAI):
    """By the same prompt, as the count of its tokens shows."""
    chat = client.chat.completions.create(model="abacus", messages=QUESTION, temperature=0)
    response = client.responses.create(model="abacus", input=QUESTION, temperature=0)
    greedy = {"temperature": 0}
    fields: Any = {"model": "abacus", "max_tokens": 100, "messages": QUESTION, "extra_body": greedy}
    message = claude.messages.create(**fields)
    with claude.messages.stream(**fields) as stream:
        streamed = "".join(stream.text_stream)
    texts = {
        chat.choices[0].message.content,
        response.output_text,
        message.content[-1].model_dump()["text"],
        streamed,
    }
    assert len(texts) == 1
    assert chat.usage is not None
    assert response.usage is not None
    counted = claude.messages.count_tokens(model="abacus", messages=QUESTION)
    assert chat.usage.prompt_tokens == response.usage.input_tokens == counted.input_tokens
    assert chat.usage.completion_tokens == response.usage.output_tokens
    assert chat.usage.completion_tokens == message.usage.output_tokens


def test_every_api_tells_what_came_from_the_prefix_cache(
    claude: anthropic.Anthropic, client: openai.OpenAI
):
    chat: Any = client.chat.completions.create(model="abacus", messages=LONG, max_tokens=1)
    response: Any = client.responses.create(model="abacus", input=LONG, max_output_tokens=1)
    message = claude.messages.create(model="abacus", messages=LONG, max_tokens=1)
    num_prompt = chat.usage.prompt_tokens
    num_cached = (num_prompt - 1) // 64 * 64
    assert num_cached > 0
    assert response.usage.input_tokens_details.cached_tokens == num_cached
    assert message.usage.cache_read_input_tokens == num_cached
    assert message.usage.input_tokens == num_prompt - num_cached


def test_a_conversation_finds_its_prefix_in_the_cache(client: openai.OpenAI):
    first: Any = client.responses.create(model="abacus", input=LONG, max_output_tokens=80)
    second: Any = client.responses.create(
        model="abacus", input="And 1+1?", previous_response_id=first.id, max_output_tokens=1
    )
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0


def test_responses_keep_to_a_schema(client: openai.OpenAI):
    fields: Any = {"model": "abacus", "input": QUESTION, "text_format": Sum, "temperature": 0}
    answer = client.responses.parse(**fields)
    assert isinstance(answer.output_parsed, Sum)
    with client.responses.stream(**fields) as stream:
        streamed = stream.get_final_response()
    assert streamed.output_parsed == answer.output_parsed


def test_messages_keep_to_a_schema(claude: anthropic.Anthropic):
    schema: Any = {"type": "json_schema", "schema": Sum.model_json_schema()}
    answer = claude.messages.create(
        model="abacus", max_tokens=300, messages=QUESTION, output_config={"format": schema}
    )
    Sum.model_validate_json(answer.content[-1].model_dump()["text"])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "calculator"}])
def test_responses_call_what_they_must(client: openai.OpenAI, choice: Any):
    tool: Any = {"type": "function", "name": "calculator", "parameters": PARAMETERS}
    answer = client.responses.create(
        model="abacus", input="Hi.", tools=[tool], tool_choice=choice, max_output_tokens=300
    )
    call = answer.output[-1]
    assert call.type == "function_call"
    assert call.name == "calculator"
    assert json.loads(call.arguments).keys() == {"expression"}


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "calculator"}])
def test_messages_call_what_they_must(claude: anthropic.Anthropic, choice: Any):
    tool: Any = {"name": "calculator", "input_schema": PARAMETERS}
    answer = claude.messages.create(
        model="abacus",
        max_tokens=300,
        messages=[{"role": "user", "content": "Hi."}],
        tools=[tool],
        tool_choice=choice,
    )
    call = answer.content[-1].model_dump()
    assert (call["type"], call["name"], answer.stop_reason) == (
        "tool_use",
        "calculator",
        "tool_use",
    )
    assert call["input"].keys() == {"expression"}


def test_an_impossible_schema_is_refused_on_every_api(
    claude: anthropic.Anthropic, client: openai.OpenAI
):
    schema: Any = {"type": "object", "properties": {"a": {"$ref": "#/$defs/missing"}}}
    form: Any = {"type": "json_schema", "name": "x", "schema": schema}
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="abacus", input="Hi.", text={"format": form})
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.create(
            model="abacus",
            max_tokens=5,
            messages=[{"role": "user", "content": "Hi."}],
            output_config={"format": {"type": "json_schema", "schema": schema}},
        )
