"""Anthropic's /v1/messages in process: what becomes of the conversation, and of the answer."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server.conftest import MakeService
from tests.server.fake_engine import FakeEngine, Step, saying
from tests.server.sse import named_events
from tetrad.core.request import Finish
from tetrad.server.app import build_app
from tetrad.server.service import Service
from tetrad.server.text.tokenizer import Tokenizer

ROUTE = "/v1/messages"
TOOLS: Any = [
    {
        "name": "calculator",
        "description": "adds",
        "input_schema": {"type": "object", "properties": {"expression": {"type": "string"}}},
        "cache_control": {"type": "ephemeral"},
    }
]
CALL = "<tool_call>calculator<arg_key>expression</arg_key><arg_value>3+5</arg_value></tool_call>"


@pytest.fixture(autouse=True)
def room(engine: FakeEngine) -> None:
    engine.info["context_length"] = 1000


def body(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "What is 3+5?"}]
    return {"model": "abacus", "max_tokens": 200, "messages": messages, **fields}


def script(engine: FakeEngine, tokenizer: Tokenizer, text: str, num_per_step: int = 1) -> int:
    ids = tokenizer.encode(text, add_special_tokens=False)
    engine.script = saying(ids, num_per_step)
    return len(ids)


async def post(client: httpx.AsyncClient, **fields: Any) -> Any:
    response = await client.post(ROUTE, json=body(**fields))
    assert response.status_code == 200, response.text
    assert "x-tetrad-warning" not in response.headers, response.headers
    return named_events(response.text) if fields.get("stream") else response.json()


async def test_a_whole_answer(client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer):
    num_tokens = script(engine, tokenizer, "three plus five</think>3 + 5 = 8" + CALL)
    answer = await post(client, tools=TOOLS)
    call_id = answer["content"][2].pop("id")
    assert call_id.startswith("call_")
    assert answer.pop("id").startswith("msg_")
    num_prompt = len(engine.seen[0].prompt_ids)
    num_thinking = len(tokenizer.encode("three plus five</think>", add_special_tokens=False))
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "abacus",
        "content": [
            {"type": "thinking", "thinking": "three plus five", "signature": ""},
            {"type": "text", "text": "3 + 5 = 8", "citations": None},
            {"type": "tool_use", "name": "calculator", "input": {"expression": "3+5"}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": num_prompt - 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": num_tokens + 1,
            "output_tokens_details": {"thinking_tokens": num_thinking},
        },
    }


@pytest.mark.parametrize("num_per_step", [1, 3, 200])
@pytest.mark.parametrize("text", ["use it</think>Well." + CALL + CALL + "Done.", "</think>é"])
async def test_a_stream_joins_to_the_whole(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    tokenizer: Tokenizer,
    text: str,
    num_per_step: int,
):
    script(engine, tokenizer, text, num_per_step)
    whole = await post(client, tools=TOOLS)
    streamed = joined(await post(client, tools=TOOLS, stream=True))
    for message in (whole, streamed):
        del message["id"]
        for block in message["content"]:
            block.pop("id", None)
    assert streamed == whole


def joined(events: list[Any]) -> dict[str, Any]:
    """The message as Anthropic's documentation says to put it together."""
    start, ping, *pieces, end, stop = events
    assert (start["type"], ping, stop) == (
        "message_start",
        {"type": "ping"},
        {"type": "message_stop"},
    )
    message = dict(start["message"])
    assert message["content"] == []
    assert message["stop_reason"] is None
    is_open = False
    for piece in pieces:
        if piece["type"] == "content_block_start":
            assert not is_open
            assert piece["index"] == len(message["content"])
            message["content"].append(piece["content_block"])
        elif piece["type"] == "content_block_delta":
            add(message["content"][piece["index"]], piece["delta"])
        is_open = piece["type"] != "content_block_stop"
        assert piece["index"] == len(message["content"]) - 1
    assert not is_open
    for block in message["content"]:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["input"])
    message.update(end["delta"], usage=end["usage"])
    return message


def add(block: dict[str, Any], delta: dict[str, Any]) -> None:
    match delta:
        case {"type": "text_delta", "text": text}:
            block["text"] += text
        case {"type": "thinking_delta", "thinking": text}:
            block["thinking"] += text
        case {"type": "input_json_delta", "partial_json": text}:
            block["input"] = (block["input"] or "") + text
        case _:
            raise AssertionError(delta)


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({}, "end_turn", None),
        ({"max_tokens": 3}, "max_tokens", None),
        ({"stop_sequences": ["two", "x"]}, "stop_sequence", "two"),
        ({"stop": "two"}, "stop_sequence", "two"),
    ],
)
async def test_why_it_ended(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    tokenizer: Tokenizer,
    fields: dict[str, Any],
    reason: str,
    sequence: str | None,
):
    script(engine, tokenizer, "</think>one two three")
    answer = await post(client, **fields)
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
    end = (await post(client, **fields, stream=True))[-2]
    assert end["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


async def test_a_conversation_is_rendered_as_a_chat(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
):
    script(engine, tokenizer, "</think>8")
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "3+"}, {"type": "text", "text": "5"}],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "a tool", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Well."},
                {
                    "type": "tool_use",
                    "id": "c",
                    "name": "calculator",
                    "input": {"expression": "3+5"},
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c",
                    "content": [{"type": "text", "text": "8"}],
                },
                {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    fields = {"messages": messages, "system": system, "tools": TOOLS}
    await post(client, **fields)
    prompt = tokenizer.decode(engine.seen[0].prompt_ids)
    assert "<|system|>Be brief.<|user|>3+5<|assistant|>" in prompt
    assert "Well.<tool_call>calculator<arg_key>expression</arg_key><arg_value>3+5<" in prompt
    assert "<|observation|><tool_response>8</tool_response><|user|>So?<|assistant|>" in prompt
    counted = await client.post(f"{ROUTE}/count_tokens", json={"model": "abacus", **fields})
    assert counted.json() == {"input_tokens": len(engine.seen[0].prompt_ids)}


async def test_a_beginning_of_the_answer_is_continued(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
):
    script(engine, tokenizer, "5 = 8")
    messages = [*body()["messages"], {"role": "assistant", "content": "3 +"}]
    answer = await post(client, messages=messages)
    assert [block["text"] for block in answer["content"]] == ["5 = 8"]
    assert tokenizer.decode(engine.seen[0].prompt_ids).endswith("</think>3 +")


async def test_thinking_can_be_switched_off(client: httpx.AsyncClient, engine: FakeEngine):
    await post(client, thinking={"type": "disabled"})
    await post(client, thinking={"type": "enabled", "budget_tokens": 1024})
    await post(client, output_config={"effort": "high"})
    off, *on = engine.seen
    assert off.prompt_ids != on[0].prompt_ids == on[1].prompt_ids


async def test_sampling_fields_of_all_names_reach_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine
):
    await post(
        client,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        repetition_penalty=1.5,
        ignore_eos=True,
        min_tokens=2,
        max_tokens=5,
        logit_bias={"5": 1.0},
        metadata={"user_id": "u"},
    )
    sampling = engine.seen[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.5)
    assert (sampling.min_new_tokens, sampling.max_new_tokens) == (2, 5)
    assert sampling.ignore_eos
    assert sampling.logit_bias == {5: 1.0}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens: input should be a valid integer"),
        ({"messages": []}, "messages: list should have at least 1 item"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            'messages[0].content[0]: a block of type "image" cannot be read',
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            'a block of type "tool_result" needs tool_use_id',
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "type 'web_search_20250305' is Anthropic's own: nothing here runs it",
        ),
        ({"tools": [{"name": "search"}]}, "a tool needs an input_schema"),
        ({"stop_sequences": ["a"] * 40}, "at most 32 stop strings"),
        ({"mcp_servers": [{}]}, "mcp_servers: no MCP server is called"),
        ({"n": 2}, "n: input should be less than or equal to 1"),
        ({"temperature": "hot"}, "temperature: "),
    ],
)
async def test_mistakes_are_sentences_in_anthropics_shape(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], message: str
):
    for stream in (False, True):
        response = await client.post(ROUTE, json=body(stream=stream, **fields))
        error = check_error(response, 400, "invalid_request_error")
        assert message in error
    assert engine.seen == []


async def test_a_stored_thread_is_refused_as_anthropics_sdk_understands_it(
    client: httpx.AsyncClient, engine: FakeEngine
):
    """It then sends the whole conversation; `tool_runner` begins with a thread."""
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        response = await client.post(ROUTE, json=body(thread=thread))
        assert "send all its messages" in check_error(response, 400, "invalid_request_error")
        details = response.json()["error"]["details"]
        assert details == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert engine.seen == []
    assert (await client.post(ROUTE, json=body(thread=None))).status_code == 200


async def test_the_request_id_has_anthropics_name_too(client: httpx.AsyncClient):
    for answer in (
        await client.post(ROUTE, json=body()),
        await client.post(ROUTE, json=body(n=2)),
    ):
        assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert "request-id" not in (await client.get("/v1/models")).headers


def check_error(response: httpx.Response, status: int, kind: str) -> str:
    assert response.status_code == status, response.text
    value = response.json()
    assert value["type"] == "error"
    assert value["error"]["type"] == kind
    return str(value["error"]["message"])


async def test_other_errors_have_anthropics_shape(
    client: httpx.AsyncClient, engine: FakeEngine, service: Service
):
    response = await client.post(ROUTE, json=body(model="claude"))
    assert "'abacus' is" in check_error(response, 404, "not_found_error")
    check_error(await client.get(ROUTE), 405, "invalid_request_error")
    check_error(await client.post(f"{ROUTE}/x"), 404, "not_found_error")
    batches = await client.post(f"{ROUTE}/batches", json={})
    assert "keeps no files, batches" in check_error(batches, 400, "invalid_request_error")
    engine.script = lambda _: [Step((5,)), Step((), Finish("error", message="No luck."))]
    check_error(await client.post(ROUTE, json=body()), 500, "api_error")
    *_, last = await post(client, stream=True)
    assert last == {"type": "error", "error": {"type": "api_error", "message": "No luck."}}
    service.phase = "draining"
    check_error(await client.post(ROUTE, json=body()), 503, "overloaded_error")


async def test_a_message_that_an_operator_ends_is_an_error(
    client: httpx.AsyncClient, engine: FakeEngine
):
    """With `max_tokens` an agent would go on with it, and clients would send a plain 500 again."""
    engine.script = lambda _: [Step((18,)), Step((), Finish("abort"))]
    response = await client.post(ROUTE, json=body())
    assert "operator ended" in check_error(response, 500, "api_error")
    assert response.headers["x-should-retry"] == "false"
    *events, last = await post(client, stream=True)
    assert last["error"] == {
        "type": "api_error",
        "message": "The server's operator ended this request.",
    }
    kinds = [event["type"] for event in events]
    assert kinds[-2:] == ["content_block_delta", "content_block_stop"]
    assert "message_delta" not in kinds


async def test_a_key_is_taken_under_both_names(make_service: MakeService):
    transport = httpx.ASGITransport(build_app(make_service(api_key="s3cret")))
    async with httpx.AsyncClient(transport=transport, base_url="http://tetrad") as client:
        check_error(await client.post(ROUTE, json=body()), 401, "authentication_error")
        for headers, status in (
            ({"x-api-key": "s3cret"}, 200),
            ({"Authorization": "Bearer s3cret"}, 200),
            ({"x-api-key": "other"}, 401),
            ({"x-api-key": "s3cret", "Authorization": "Bearer other"}, 401),
        ):
            response = await client.post(ROUTE, json=body(), headers=headers)
            assert response.status_code == status
            models = await client.get("/v1/models", headers=headers)
            assert models.status_code == status
