"""/tokenize and /detokenize in process."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tetrad.server.service import Service
from tetrad.server.text.tokenizer import Tokenizer


async def post(client: httpx.AsyncClient, route: str, **fields: Any) -> Any:
    response = await client.post(route, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_text_and_back(client: httpx.AsyncClient, tokenizer: Tokenizer):
    for text in ("3+5", "8-2 é 漢", ""):
        found = await post(client, "/tokenize", model="abacus", prompt=text)
        expected = tokenizer.encode(text, add_special_tokens=True)
        assert found == {"tokens": expected, "count": len(expected), "max_model_len": 256}
        bare = await post(client, "/tokenize", prompt=text, add_special_tokens=False)
        assert bare["tokens"] == tokenizer.encode(text, add_special_tokens=False)
        back = await post(client, "/detokenize", tokens=bare["tokens"])
        assert back == {"prompt": text, "text": text}


async def test_several_texts(client: httpx.AsyncClient, tokenizer: Tokenizer):
    found = await post(client, "/tokenize", prompt=["3+5", "1"], add_special_tokens=False)
    assert found["tokens"] == [tokenizer.encode(t, add_special_tokens=False) for t in ("3+5", "1")]
    assert found["count"] == [len(ids) for ids in found["tokens"]]


async def test_messages_are_what_a_chat_computes(client: httpx.AsyncClient):
    messages = [{"role": "user", "content": "What is 3+5?"}]
    found = await post(client, "/tokenize", messages=messages)
    answer = await post(
        client, "/v1/chat/completions", model="abacus", messages=messages, max_tokens=1
    )
    assert found["count"] == answer["usage"]["prompt_tokens"]
    text = (await post(client, "/detokenize", tokens=found["tokens"]))["text"]
    assert "What is 3+5?" in text
    plain = await post(client, "/detokenize", tokens=found["tokens"], skip_special_tokens=True)
    assert len(plain["text"]) < len(text)


@pytest.mark.parametrize(
    ("route", "fields", "sentence"),
    [
        ("/tokenize", {}, "either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user"}]}, "messages"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "a" * 100_000}, "256"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "other"),
        ("/tokenize", {"prompt": ["3+5" * 2000] * 400}, "2400000 characters together"),
        ("/detokenize", {"tokens": [1] * 262_145}, "tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "3"}, "tokens"),
    ],
)
async def test_what_cannot_be_is_one_sentence(
    client: httpx.AsyncClient, route: str, fields: dict[str, Any], sentence: str
):
    response = await client.post(route, json=fields)
    assert response.status_code in (400, 404)
    assert sentence in response.json()["error"]["message"]


async def test_what_takes_long_gives_the_same(client: httpx.AsyncClient, tokenizer: Tokenizer):
    ids = tokenizer.encode("3+5", add_special_tokens=False) * 3000
    assert (await post(client, "/detokenize", tokens=ids))["text"] == "3+5" * 3000
    messages = [{"role": "user", "content": "1"}] * 501
    few = await post(client, "/tokenize", messages=messages[:2])
    many = await post(client, "/tokenize", messages=messages)
    each = few["count"] - (await post(client, "/tokenize", messages=messages[:1]))["count"]
    assert many["count"] == few["count"] + 499 * each


async def test_ids_without_a_token_are_refused_and_leave_nothing_behind(
    client: httpx.AsyncClient, service: Service
):
    tokenizer = service.model.tokenizer
    ids = range(tokenizer.vocab_size, tokenizer.vocab_size + 1000)
    assert tokenizer.decode(ids) == ""
    assert not set(ids) & set(tokenizer._bytes)
    response = await client.post("/detokenize", json={"tokens": [20, 2**31 - 1]})
    assert response.status_code == 400
    assert "tokens holds id 2147483647" in response.json()["error"]["message"]
