"""SGLang's /generate in process: the shapes its benchmark reads."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.fake_engine import EOS, FakeEngine, saying
from tests.server.sse import events
from tetrad.server.text.tokenizer import Tokenizer


async def post(client: httpx.AsyncClient, **fields: Any) -> Any:
    response = await client.post("/generate", json=fields)
    assert response.status_code == 200, response.text
    return events(response.text) if fields.get("stream") else response.json()


async def test_the_request_of_sglangs_benchmark(client: httpx.AsyncClient, engine: FakeEngine):
    engine.script = saying([18, 10])
    chunks = await post(
        client,
        text="3+5",
        sampling_params={"temperature": 0.0, "max_new_tokens": 5, "ignore_eos": True},
        stream=True,
        lora_path=None,
        return_logprob=False,
        return_routed_experts=False,
        logprob_start_len=-1,
    )
    assert [chunk["text"] for chunk in chunks] == ["3", "3+", "3+3", "3+3+", "3+3+3"]
    assert [len(chunk["output_ids"]) for chunk in chunks] == [1, 2, 3, 4, 5]
    assert [chunk["meta_info"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 5]
    first, last = chunks[0]["meta_info"], chunks[-1]["meta_info"]
    assert first["finish_reason"] is None
    assert "e2e_latency" not in first
    assert last.pop("e2e_latency") >= 0
    assert last == {
        "id": engine.seen[0].rid,
        "finish_reason": {"type": "length", "length": 5},
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "cached_tokens": 3,
        "reasoning_tokens": 0,
        "num_retractions": 0,
        "weight_version": "default",
    }
    assert "index" not in chunks[0]


async def test_whole_answers_and_batches(client: httpx.AsyncClient, tokenizer: Tokenizer):
    ids = tokenizer.encode("3+5", add_special_tokens=False)
    one = await post(client, input_ids=ids)
    assert one["text"] == "3+5"
    assert one["output_ids"] == [*ids, EOS]
    assert one["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    assert one["meta_info"]["completion_tokens"] == 4
    many = await post(client, input_ids=[ids, ids[:1]])
    assert [item["text"] for item in many] == ["3+5", "3"]
    assert [item["text"] for item in await post(client, text=["3", "5"])] == ["3", "5"]
    assert [item["text"] for item in await post(client, text=["3"])] == ["3"]
    both = await post(client, text="3", sampling_params={"n": 2})
    assert [item["text"] for item in both] == ["3", "3"]


async def test_a_batch_may_have_its_own_sampling_and_names(
    client: httpx.AsyncClient, engine: FakeEngine
):
    samplings = [{"max_new_tokens": 1, "sampling_seed": 4}, {"min_new_tokens": 1, "stop": "5"}]
    many = await post(client, text=["33", "3533"], sampling_params=samplings, rid=["a", "b"])
    assert [item["text"] for item in many] == ["3", "3"]
    assert many[1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": "5"}
    assert [item["meta_info"]["id"] for item in many] == ["a", "b"]
    by_name = {request.rid: request.sampling for request in engine.seen}
    assert (by_name["a"].max_new_tokens, by_name["a"].seed) == (1, 4)
    assert by_name["b"].max_new_tokens == 128


async def test_a_streamed_batch_says_which_is_which(client: httpx.AsyncClient):
    final = {}
    for chunk in await post(client, text=["33", "5"], stream=True):
        final[chunk["index"]] = chunk["text"]
    assert final == {0: "33", 1: "5"}


async def test_logprobs(client: httpx.AsyncClient):
    answer = await post(client, text="35", return_logprob=True, top_logprobs_num=2)
    meta = answer["meta_info"]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    assert len(answer["output_ids"]) == meta["completion_tokens"] == 3
    assert meta["output_top_logprobs"][0] == [[-0.5, 0, None], [-1.5, 1, None]]


@pytest.mark.parametrize("num_top", [0, 1])
async def test_logprobs_of_the_prompt_are_there_and_empty(client: httpx.AsyncClient, num_top: int):
    """SGLang's clients look them up whenever they ask for log-probabilities."""
    fields = {"text": "35", "return_logprob": True, "logprob_start_len": -1}
    for chunk in await post(client, **fields, top_logprobs_num=num_top, stream=True):
        meta = chunk["meta_info"]
        assert meta["input_token_logprobs"] == []
        assert meta["output_token_logprobs_length"] == len(meta["output_token_logprobs"])
        tops = [meta.get("input_top_logprobs"), meta.get("output_top_logprobs")]
        assert tops == (
            [[], [[[-0.5, 0, None]]] * len(chunk["output_ids"])] if num_top else [None] * 2
        )


async def test_every_token_has_its_logprob_also_those_that_leave_no_text(
    client: httpx.AsyncClient,
):
    sampling = {"stop": "53"}
    chunks = await post(
        client, text="3533", sampling_params=sampling, return_logprob=True, stream=True
    )
    for chunk in chunks:
        meta = chunk["meta_info"]
        assert [entry[1] for entry in meta["output_token_logprobs"]] == chunk["output_ids"]
        assert len(chunk["output_ids"]) == meta["completion_tokens"]
    assert (chunks[-1]["text"], len(chunks[-1]["output_ids"])) == ("3", 3)


async def test_steps_whose_text_waits_still_count(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
):
    engine.script = saying(tokenizer.encode("é", add_special_tokens=False))
    chunks = await post(client, text="3", stream=True)
    assert [chunk["text"] for chunk in chunks] == ["", "é", "é"]
    assert [chunk["meta_info"]["completion_tokens"] for chunk in chunks] == [1, 2, 3]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"image_data": "x.png"}, "this model reads text"),
        ({"lora_path": "adapter"}, "the weights of its model alone"),
        ({"return_hidden_states": True}, "is not supported yet"),
        ({"sampling_params": {"stop_regex": "a+"}}, "is not supported yet"),
    ],
)
async def test_what_would_change_the_answer_is_refused(
    client: httpx.AsyncClient, fields: dict[str, Any], reason: str
):
    response = await client.post("/generate", json={"text": "3", **fields})
    assert response.status_code == 400
    assert f"{reason}; leave this field out." in response.json()["error"]["message"]


async def test_a_stop_string_stays_if_asked_for(client: httpx.AsyncClient):
    sampling = {"stop": "b", "no_stop_trim": True}
    answer = await post(client, text="abc", sampling_params=sampling)
    assert answer["text"] == "ab"
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "b"}


async def test_what_is_switched_off_may_be_there(client: httpx.AsyncClient):
    off: dict[str, Any] = {"lora_path": None, "return_hidden_states": False, "image_data": []}
    answer = await post(client, text="3", sampling_params={"stop_regex": None}, **off)
    assert answer["text"] == "3"
