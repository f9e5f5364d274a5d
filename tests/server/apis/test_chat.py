"""/v1/chat/completions in process: what is sent, streamed and whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.server.apis.test_about import connect
from tests.server.conftest import MakeService
from tests.server.fake_engine import EOS, FakeEngine, Step, saying
from tests.server.sse import events
from tetrad.core.request import Finish
from tetrad.server.service import Service
from tetrad.server.text.chat_template import ChatTemplate
from tetrad.server.text.tokenizer import Tokenizer

ROUTE = "/v1/chat/completions"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "parameters": {"properties": {"expression": {"type": "string"}}},
        },
    }
]
ANSWER = "three plus five</think>3 + 5 = 8"
CALL = (
    "use it</think>Well.<tool_call>calculator"
    "<arg_key>expression</arg_key><arg_value>3+5</arg_value></tool_call>"
)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "abacus", "messages": [{"role": "user", "content": "What is 3+5?"}], **fields}


def script(engine: FakeEngine, tokenizer: Tokenizer, text: str, num_per_step: int = 1) -> int:
    """Make the engine say `text`; returns its number of tokens."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    engine.script = saying(ids, num_per_step)
    return len(ids)


async def test_a_whole_answer(client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer):
    num_tokens = script(engine, tokenizer, ANSWER)
    response = await client.post(ROUTE, json=body())
    assert response.status_code == 200
    answer = response.json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "abacus"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "3 + 5 = 8",
                "reasoning_content": "three plus five",
            },
            "logprobs": None,
            "finish_reason": "stop",
            "matched_stop": EOS,
            "stop_reason": None,
        }
    ]
    usage = answer["usage"]
    assert usage["completion_tokens"] == num_tokens + 1
    assert usage["total_tokens"] == usage["prompt_tokens"] + num_tokens + 1
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    thinking = tokenizer.encode("three plus five</think>", add_special_tokens=False)
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len(thinking)}
    prompt = tokenizer.decode(engine.seen[0].prompt_ids)
    assert prompt == "[gMASK]<sop><|user|>What is 3+5?<|assistant|><think>"


@pytest.mark.parametrize("text", [ANSWER, CALL])
@pytest.mark.parametrize("num_per_step", [1, 3, 50])
async def test_a_streamed_answer_is_the_whole_one(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    tokenizer: Tokenizer,
    text: str,
    num_per_step: int,
):
    script(engine, tokenizer, text, num_per_step)
    fields = {"tools": TOOLS, "logprobs": True, "top_logprobs": 2, "seed": 1}
    whole = (await client.post(ROUTE, json=body(**fields))).json()
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    response = await client.post(ROUTE, json=body(**fields, **stream))
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events(response.text)
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    message, logprobs = joined(chunks)
    for call in whole["choices"][0]["message"].get("tool_calls", []):
        call["id"] = None
    assert message == whole["choices"][0]["message"]
    assert logprobs == whole["choices"][0]["logprobs"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]


def joined(chunks: list[dict[str, Any]]) -> tuple[dict[str, Any], list[Any]]:
    """What a client makes of the chunks of one choice."""
    message: dict[str, Any] = {"role": None, "content": None, "reasoning_content": None}
    calls: list[dict[str, Any]] = []
    logprobs: list[Any] = []
    for chunk in chunks:
        choice = chunk["choices"][0]
        delta = dict(choice["delta"])
        for piece in delta.pop("tool_calls", []):
            if "id" in piece:
                assert piece["id"].startswith("call_")
                assert piece["index"] == len(calls)
                calls.append({"id": None, "type": "function", "function": piece["function"]})
            else:
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
        for key, text in delta.items():
            message[key] = (message[key] or "") + text
        logprobs += choice["logprobs"]["content"] if choice["logprobs"] else []
    if calls:
        message["tool_calls"] = calls
    return message, logprobs


async def test_a_tool_call(client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer):
    script(engine, tokenizer, CALL)
    choice = (await client.post(ROUTE, json=body(tools=TOOLS))).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Well."
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "calculator", "arguments": '{"expression": "3+5"}'}
    assert "# Tools" in tokenizer.decode(engine.seen[0].prompt_ids)


async def test_without_tools_a_call_is_text_and_choice_none_hides_the_tools(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
):
    script(engine, tokenizer, CALL)
    fields = {"tools": TOOLS, "tool_choice": "none"}
    choice = (await client.post(ROUTE, json=body(**fields))).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"].startswith("Well.<tool_call>calculator")
    assert "# Tools" not in tokenizer.decode(engine.seen[0].prompt_ids)


async def test_what_the_template_does_not_know_is_told(service: Service, client: httpx.AsyncClient):
    """In a header, beside fields that nobody knows."""
    plain = ChatTemplate("{{ messages[0].content }}")
    service.model = replace(service.model, template=plain, reasoning_parser=None)
    for fields, warning in (
        ({}, ""),
        ({"tools": TOOLS}, "tools have no effect: the chat template of this model does not show"),
        ({"tools": TOOLS, "tool_choice": "none"}, ""),
        ({"reasoning_effort": "high"}, "reasoning_effort has no effect: the chat template of"),
        ({"reasoning_effort": "none"}, ""),
        ({"tols": [], "tools": TOOLS}, "Unknown field 'tols'. Did you mean 'tools'? tools have no"),
    ):
        response = await client.post(ROUTE, json=body(**fields, max_tokens=2, stream=True))
        assert response.status_code == 200, response.text
        told = response.headers.get("x-tetrad-warning", "")
        assert told.startswith(warning)
        assert bool(told) == bool(warning)


async def test_an_effort_that_nobody_knows_is_told(
    service: Service, client: httpx.AsyncClient, make_service: MakeService
):
    template = "{{ messages[0].content }}{{ reasoning_effort == 'ultra' }}"
    service.model = replace(service.model, template=ChatTemplate(template))
    known = ("Unknown reasoning_effort 'hi\\xe9gh'; there are none, minimal, low, medium, high, "
             "xhigh, max.")  # fmt: skip
    for fields, warning in (
        ({"reasoning_effort": "hiégh"}, known),
        ({"reasoning": {"effort": "hiégh"}}, known),
        ({"reasoning_effort": "high"}, ""),
        ({"reasoning_effort": "ultra"}, ""),
        ({"reasoning_effort": 0.5}, ""),
    ):
        response = await client.post(ROUTE, json=body(**fields, max_tokens=2))
        assert response.status_code == 200, response.text
        assert response.headers.get("x-tetrad-warning", "") == warning
    async with connect(make_service(strict_api=True)) as strict:
        response = await strict.post(ROUTE, json=body(reasoning_effort="hihg"))
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "reasoning_effort"


async def test_a_conversation_with_tool_results_is_rendered(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
):
    call = {"name": "calculator", "arguments": '{"expression": "3+5"}'}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "3+"}, {"type": "text", "text": "5"}],
        },
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": call}]},
        {"role": "tool", "tool_call_id": "c", "content": "8"},
    ]
    script(engine, tokenizer, "</think>8")
    assert (await client.post(ROUTE, json=body(messages=messages))).status_code == 200
    prompt = tokenizer.decode(engine.seen[0].prompt_ids)
    assert "<|system|>Be brief.<|user|>3+5<|assistant|>" in prompt
    assert "<arg_key>expression</arg_key><arg_value>3+5</arg_value></tool_call>" in prompt
    assert "<|observation|><tool_response>8</tool_response>" in prompt


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
        {"reasoning": {"effort": "none"}},
        {"reasoning": {"enabled": False}},
        {"thinking": {"type": "disabled"}},
        {"reasoning_effort": "high", "thinking": {"type": "disabled"}},
        {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
    ],
)
async def test_thinking_can_be_switched_off(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer, fields: dict[str, Any]
):
    script(engine, tokenizer, "3 + 5 = 8")
    message = (await client.post(ROUTE, json=body(**fields))).json()["choices"][0]["message"]
    assert message["content"] == "3 + 5 = 8"
    assert message["reasoning_content"] is None
    assert tokenizer.decode(engine.seen[0].prompt_ids).endswith("<|assistant|></think>")


async def test_several_choices_share_a_prompt_and_differ_in_seed(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
):
    num_tokens = script(engine, tokenizer, ANSWER)
    answer = (await client.post(ROUTE, json=body(n=3, seed=2**63 - 1))).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["prompt_tokens"] == len(engine.seen[0].prompt_ids)
    assert answer["usage"]["completion_tokens"] == 3 * (num_tokens + 1)
    assert sorted(r.sampling.seed or 0 for r in engine.seen) == [0, 1, 2**63 - 1]
    response = await client.post(ROUTE, json=body(n=3, stream=True))
    texts = ["", "", ""]
    for chunk in events(response.text):
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == ["3 + 5 = 8"] * 3


async def test_logprobs_name_tokens_and_bytes(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
):
    script(engine, tokenizer, "</think>é")
    response = await client.post(ROUTE, json=body(logprobs=True, top_logprobs=1))
    content = response.json()["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(token["bytes"]) for token in content).decode() == "</think>é"
    assert content[0]["token"] == "</think>"
    assert content[0]["logprob"] == -0.5
    assert content[0]["top_logprobs"] == [{"token": "!", "logprob": -0.5, "bytes": [33]}]


async def test_a_stop_string_aborts_the_engine_request(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
):
    script(engine, tokenizer, "</think>one two three")
    choice = (await client.post(ROUTE, json=body(stop=["two"]))).json()["choices"][0]
    assert choice["message"]["content"] == "one "
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", "two")
    assert engine.aborted == [engine.seen[0].rid]
    assert engine.live == {}


@pytest.mark.parametrize(
    ("path", "least"), [(ROUTE, body()), ("/v1/completions", {"prompt": "3", "model": "abacus"})]
)
async def test_what_ended_an_answer_is_told_in_sglang_s_field_and_in_vllm_s(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    tokenizer: Tokenizer,
    path: str,
    least: dict[str, Any],
):
    """Whole and in the last chunk. vLLM's is null at one of the model's own end tokens."""
    (two,) = tokenizer.encode("2", add_special_tokens=False)
    for fields, matched, stop_reason in (
        ({}, EOS, None),
        ({"stop": ["2"]}, "2", "2"),
        ({"stop_token_ids": [two]}, two, two),
        ({"max_tokens": 1}, None, None),
    ):
        script(engine, tokenizer, "</think>12")
        if matched == two:
            engine.script = lambda _: [Step((5,)), Step((two,), Finish("stop", two))]
        whole = (await client.post(path, json=least | fields)).json()["choices"][0]
        stream = await client.post(path, json=least | fields | {"stream": True})
        *chunks, last = [chunk["choices"][0] for chunk in events(stream.text)]
        for choice in (whole, last):
            assert (choice["matched_stop"], choice["stop_reason"]) == (matched, stop_reason)
        assert not any("stop_reason" in chunk or "matched_stop" in chunk for chunk in chunks)


async def test_sampling_fields_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine):
    fields = {
        "max_completion_tokens": 7,
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "logit_bias": {"5": -100},
        "seed": -1,
        "stop_token_ids": [3],
        "ignore_eos": True,
        "logprobs": True,
    }
    assert (await client.post(ROUTE, json=body(**fields))).status_code == 200
    sampling = engine.seen[0].sampling
    assert (sampling.max_new_tokens, sampling.min_new_tokens) == (7, 2)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 0)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.2, -0.3)
    assert sampling.logit_bias == {5: -100.0}
    assert sampling.seed == 2**63 - 1
    assert sampling.stop_token_ids == (3,)
    assert sampling.ignore_eos
    assert sampling.num_logprobs == 0


async def test_what_a_request_leaves_out_comes_from_the_model_and_the_context(
    client: httpx.AsyncClient, engine: FakeEngine
):
    await client.post(ROUTE, json=body(max_tokens=None, temperature=None, user="x", store=True))
    request = engine.seen[0]
    assert request.sampling.temperature == 0.0
    assert request.sampling.max_new_tokens == 256 - len(request.prompt_ids)
    engine.info["max_total_tokens"] = 128
    assert (await client.post(ROUTE, json=body())).status_code == 200
    assert engine.seen[1].sampling.max_new_tokens == 128 - len(request.prompt_ids)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"separate_reasoning": False}, "reasoning is always separate; join"),
        ({"include_reasoning": False}, "reasoning is always separate; join"),
        ({"modalities": ["text", "audio"]}, 'this model writes text; ["text"] works'),
        ({"cache_salt": "x"}, "--disable-radix-cache"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "needs add_generation_prompt to be false",
        ),
    ],
)
async def test_what_would_change_the_answer_is_refused(
    client: httpx.AsyncClient, field: dict[str, Any], message: str
):
    response = await client.post(ROUTE, json=body(**field))
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == next(iter(field))


async def test_what_is_switched_off_may_be_there(client: httpx.AsyncClient):
    off = {
        "separate_reasoning": True,
        "json_schema": None,
        "cache_salt": "",
        "modalities": ["text"],
    }
    assert (await client.post(ROUTE, json=body(**off))).status_code == 200


async def test_the_last_message_is_continued(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
):
    script(engine, tokenizer, "5 = 8")
    messages = [
        {"role": "user", "content": "What is 3+5?"},
        {"role": "assistant", "content": "3 + "},
    ]
    fields = {"messages": messages, "continue_final_message": True}
    message = (await client.post(ROUTE, json=body(**fields))).json()["choices"][0]["message"]
    assert message["content"] == "5 = 8"
    prompt = tokenizer.decode(engine.seen[0].prompt_ids)
    assert prompt.endswith("<|user|>What is 3+5?<|assistant|></think>3 +")
    response = await client.post(ROUTE, json=body(messages=messages, add_generation_prompt=False))
    assert response.status_code == 200
    prompt = tokenizer.decode(engine.seen[1].prompt_ids)
    assert not prompt.endswith("<|assistant|><think>")
    fields["messages"] = [*messages, {"role": "assistant", "content": " "}]
    response = await client.post(ROUTE, json=body(**fields))
    assert "needs a last message with a text" in response.json()["error"]["message"]


@pytest.mark.parametrize("name", ["rid", "request_id"])
async def test_a_request_may_bring_its_id(client: httpx.AsyncClient, engine: FakeEngine, name: str):
    headers = {"X-Request-Id": "of-the-head"}
    response = await client.post(ROUTE, json=body(**{name: "mine"}), headers=headers)
    assert response.headers["X-Request-Id"] == "mine"
    assert engine.seen[0].request_id == "mine"
    response = await client.post(ROUTE, json=body(**{name: "a\r\nb"}))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name


async def test_each_chunk_may_have_the_usage_so_far(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
):
    script(engine, tokenizer, "</think>3 + 5 = 8")
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = await client.post(ROUTE, json=body(stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in events(response.text)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
