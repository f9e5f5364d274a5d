"""The real `openai` client against the real server. What is asked decides the form of the answer,
whatever the weights are worth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.conftest import Served

QUESTION = [{"role": "user", "content": "What is 3+5?"}]


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI):
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == ("abacus", "tetrad")


def test_chat_streams_what_it_says_at_once(client: openai.OpenAI):
    """Greedy, so the pieces of the stream must join to the whole answer."""
    common = {"model": "abacus", "messages": QUESTION, "temperature": 0, "max_tokens": 48}
    whole = client.chat.completions.create(**common)  # type: ignore[call-overload]
    pieces: dict[str, list[str]] = {"content": [], "reasoning_content": []}
    finish, usage = None, None
    for chunk in client.chat.completions.create(  # type: ignore[call-overload]
        **common, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            for name, parts in pieces.items():
                parts.append(getattr(choice.delta, name, None) or "")
    message = whole.choices[0].message
    assert "".join(pieces["content"]) == (message.content or "")
    assert "".join(pieces["reasoning_content"]) == (message.reasoning_content or "")
    assert finish == whole.choices[0].finish_reason
    assert usage is not None
    assert usage.model_dump() == whole.usage.model_dump()
    assert 1 <= usage.completion_tokens <= 48


def test_completions_with_logprobs_stop_and_n(client: openai.OpenAI):
    answer = client.completions.create(
        model="abacus",
        prompt="3+5=",
        max_tokens=8,
        n=2,
        logprobs=3,
        temperature=1,
        seed=7,
        extra_body={"ignore_eos": True},
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.finish_reason == "length"
        assert choice.logprobs is not None
        assert len(choice.logprobs.token_logprobs or ()) == 8
        assert all(logprob <= 0 for logprob in choice.logprobs.token_logprobs or ())
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_a_seed_repeats(client: openai.OpenAI):
    def text(seed: int) -> str:
        answer = client.completions.create(
            model="abacus", prompt="1", max_tokens=12, temperature=1.5, seed=seed
        )
        return answer.choices[0].text

    assert text(11) == text(11)
    assert len({text(seed) for seed in range(4)}) > 1


def test_bad_input_is_refused_before_any_stream_starts(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match="4096"):
        client.completions.create(model="abacus", prompt=[5] * 5000, max_tokens=1, stream=True)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=QUESTION)  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="abacus", prompt="a", temperature=-1)


async def test_the_asynchronous_client_side_by_side(served: Served):
    import asyncio

    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        answers = await asyncio.gather(
            *(
                client.completions.create(
                    model="abacus",
                    prompt=f"{i}+{i}=",
                    max_tokens=6,
                    temperature=0,
                    extra_body={"ignore_eos": True},
                )
                for i in range(8)
            )
        )
    assert [a.usage.completion_tokens for a in answers if a.usage] == [6] * 8


def test_choices_of_one_prompt_share_its_computation(served: Served):
    """Seen by /generate, which gives the count of each choice apart."""
    prompt = [5 + i % 400 for i in range(150)]
    sampling = {"max_new_tokens": 2, "n": 3, "ignore_eos": True}
    answers: Any = served.post("/generate", {"input_ids": prompt, "sampling_params": sampling})
    assert [answer["meta_info"]["cached_tokens"] for answer in answers] == [0, 128, 128]
    whole = served.post("/v1/completions", {"prompt": prompt, "max_tokens": 2, "best_of": 2})
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 128}
    assert len(whole["choices"]) == 1
