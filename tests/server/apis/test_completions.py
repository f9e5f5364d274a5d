"""/v1/completions in process."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.server.conftest import MakeService, until
from tests.server.fake_engine import FakeEngine, Step, saying
from tests.server.sse import events
from tetrad.core.request import Finish, Request, TokenLogprob, packed
from tetrad.engine.prefix import names_of
from tetrad.server.app import build_app
from tetrad.server.text.tokenizer import Tokenizer

ROUTE = "/v1/completions"


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


async def post(client: httpx.AsyncClient, **fields: Any) -> Any:
    response = await client.post(ROUTE, json={"model": "abacus", **fields})
    assert response.status_code == 200, response.text
    return events(response.text) if fields.get("stream") else response.json()


async def test_every_form_of_prompt(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
):
    one, two = encode(tokenizer, "3+5"), encode(tokenizer, "8-2 é")
    for prompt, texts in (
        ("3+5", ["3+5"]),
        (["3+5", "8-2 é"], ["3+5", "8-2 é"]),
        (one, ["3+5"]),
        ([one, two], ["3+5", "8-2 é"]),
    ):
        answer = await post(client, prompt=prompt, max_tokens=50)
        assert answer["object"] == "text_completion"
        assert [choice["text"] for choice in answer["choices"]] == texts
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}


async def test_choices_of_several_prompts_are_in_order_and_counted_once(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
):
    answer = await post(client, prompt=["3", "55"], n=2, max_tokens=50)
    assert [choice["text"] for choice in answer["choices"]] == ["3", "3", "55", "55"]
    num_prompt = sum(len(encode(tokenizer, text)) for text in ("3", "55"))
    assert answer["usage"]["prompt_tokens"] == num_prompt
    assert answer["usage"]["completion_tokens"] == 2 * num_prompt + 4


@pytest.mark.parametrize("logprobs", [None, 0, 2])
async def test_a_stream_joins_to_the_whole(client: httpx.AsyncClient, logprobs: int | None):
    fields = {"prompt": "tëxt 33", "max_tokens": 50, "logprobs": logprobs}
    whole = await post(client, **fields)
    *chunks, last = await post(
        client, **fields, stream=True, stream_options={"include_usage": True}
    )
    assert last["usage"] == whole["usage"]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"] == "tëxt 33"
    assert choices[-1]["finish_reason"] == "stop"
    if logprobs is None:
        assert whole["choices"][0]["logprobs"] is None
        return
    for key, value in whole["choices"][0]["logprobs"].items():
        assert [item for c in choices for item in c["logprobs"][key]] == value
    assert whole["choices"][0]["logprobs"]["text_offset"][:3] == [0, 1, 1]
    tops = whole["choices"][0]["logprobs"]["top_logprobs"]
    assert all(len(top) == logprobs + 1 for top in tops), "the sampled one is none of the likeliest"


async def test_the_sampled_token_is_among_the_likeliest_and_parts_of_a_character_are_told_apart(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
):
    (a,), (first, second) = encode(tokenizer, "a"), encode(tokenizer, "é")
    tops = (((first, -0.1), (second, -0.2)), ((first, -0.3), (a, -0.4)))
    told = [(a, -3.0, tops[0]), (first, -0.3, tops[1])]
    logprobs = tuple(TokenLogprob(*each) for each in told)
    engine.script = lambda _: [Step((a, first), Finish("length"), logprobs)]
    found = (await post(client, prompt="3", logprobs=2))["choices"][0]["logprobs"]
    assert found["tokens"] == ["a", r"bytes:\xc3"]
    assert found["top_logprobs"] == [
        {r"bytes:\xc3": -0.1, r"bytes:\xa9": -0.2, "a": -3.0},
        {r"bytes:\xc3": -0.3, "a": -0.4},
    ]


async def test_sixteen_tokens_unless_asked_otherwise(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
):
    engine.script = saying(encode(tokenizer, "3" * 40))
    answer = await post(client, prompt="3")
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"
    engine.info["context_length"] = 9
    assert (await post(client, prompt="3" * 4))["usage"]["completion_tokens"] == 5


async def test_special_tokens_are_hidden_unless_wanted(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
):
    engine.script = saying(encode(tokenizer, "a<|user|>b<think>"))
    hidden = await post(client, prompt="3")
    assert hidden["choices"][0]["text"] == "ab<think>"
    shown = await post(client, prompt="3", skip_special_tokens=False)
    assert shown["choices"][0]["text"] == "a<|user|>b<think>"


async def test_the_prompt_comes_first_if_asked_for(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
):
    engine.script = saying(encode(tokenizer, "=8"))
    ids = [encode(tokenizer, "1é+")]
    for prompt, n, texts in (("3+5", 2, ["3+5=8"] * 2), (ids, 1, ["1é+=8"])):
        fields = {"prompt": prompt, "echo": True, "n": n}
        answer = await post(client, **fields)
        assert [choice["text"] for choice in answer["choices"]] == texts
        joined = [""] * n
        for chunk in await post(client, **fields, stream=True):
            joined[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert joined == texts


async def test_the_best_of_several_are_given(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
):
    logprob = {"a": -0.5, "b": -0.1, "c": -0.3}
    ids = {name: encode(tokenizer, name)[0] for name in logprob}

    def script(request: Request) -> list[Step]:
        name = "abc"[int(request.rid.rsplit("-", 1)[1]) % 3]
        values = (TokenLogprob(ids[name], logprob[name]),)
        return [Step((ids[name],), Finish("length"), values)]

    engine.script = script
    answer = await post(client, prompt=["3", "5"], best_of=3, n=2)
    assert [choice["text"] for choice in answer["choices"]] == ["b", "c", "b", "c"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert {choice["logprobs"] for choice in answer["choices"]} == {None}
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["usage"]["prompt_tokens"] == 2


async def test_choices_wait_until_their_prompt_is_known(
    make_service: MakeService, engine: FakeEngine
):
    """So that it is computed once; a prompt without a full page is not worth it."""
    for num_prompt, is_off, num_at_once in ((64, False, 3), (65, False, 1), (65, True, 3)):
        engine.seen.clear()
        engine.gate.clear()
        transport = httpx.ASGITransport(build_app(make_service(disable_radix_cache=is_off)))
        async with httpx.AsyncClient(transport=transport, base_url="http://tetrad") as client:
            asking = asyncio.create_task(post(client, prompt=[5] * num_prompt, n=3, max_tokens=2))
            await until(lambda: len(engine.seen) == num_at_once)  # noqa: B023 - awaited here
            await asyncio.sleep(0.02)
            assert len(engine.seen) == num_at_once
            engine.gate.set()
            assert len((await asking)["choices"]) == 3
        assert len(engine.seen) == 3
        names = () if is_off else names_of(packed([5] * num_prompt))
        assert all(request.page_names == names for request in engine.seen)
