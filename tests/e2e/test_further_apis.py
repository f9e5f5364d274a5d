"""Anthropic's and OpenAI's further APIs by their real clients against the real server and model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.e2e.conftest import Served

QUESTION: Any = [{"role": "user", "content": "What is 3+5?"}]
LONG: Any = [{"role": "user", "content": "What is 3+5? " * 30}]
"""More than one page, so that it can come from the prefix cache."""


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
