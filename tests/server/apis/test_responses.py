"""OpenAI's /v1/responses in process: the object, its stream, and what is kept of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.apis.test_about import connect
from tests.server.conftest import MakeService, until
from tests.server.fake_engine import FakeEngine, Step, saying
from tests.server.sse import named_events
from tests.server.test_aborts import aborted
from tetrad.core.request import Finish
from tetrad.server.apis.responses import routes as responses
from tetrad.server.app import build_app
from tetrad.server.service import Service
from tetrad.server.shared import shelf
from tetrad.server.text.tokenizer import Tokenizer
from tetrad.server.wire.encoding import json_bytes

ROUTE = "/v1/responses"
TOOLS: Any = [
    {
        "type": "function",
        "name": "calculator",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        "strict": False,
    }
]
CALL = "<tool_call>calculator<arg_key>expression</arg_key><arg_value>3+5</arg_value></tool_call>"


@pytest.fixture(autouse=True)
def room(engine: FakeEngine) -> None:
    engine.info["context_length"] = 1000


def script(engine: FakeEngine, tokenizer: Tokenizer, text: str, num_per_step: int = 1) -> int:
    ids = tokenizer.encode(text, add_special_tokens=False)
    engine.script = saying(ids, num_per_step)
    return len(ids)


async def post(client: httpx.AsyncClient, **fields: Any) -> Any:
    body = {"model": "abacus", "input": "What is 3+5?", **fields}
    response = await client.post(ROUTE, json=body)
    assert response.status_code == 200, response.text
    assert "x-tetrad-warning" not in response.headers, response.headers
    return named_events(response.text) if fields.get("stream") else response.json()


async def refusal(client: httpx.AsyncClient, status: int = 400, **fields: Any) -> str:
    response = await client.post(ROUTE, json={"input": "What is 3+5?", **fields})
    assert response.status_code == status, response.text
    return str(response.json()["error"]["message"])


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """What differs from one answer to the next is left out, once it was looked at."""
    assert response["id"].startswith("resp_")
    prefixes = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_"}
    output = []
    for item in response["output"]:
        assert item["id"].startswith(prefixes[item["type"]])
        output.append({k: v for k, v in item.items() if k not in ("id", "call_id")})
    rest = {k: v for k, v in response.items() if k not in ("id", "created_at", "completed_at")}
    return rest | {"output": output}


async def test_a_whole_response(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
):
    num_tokens = script(engine, tokenizer, "three plus five</think>3 + 5 = 8" + CALL)
    fields = {"instructions": "Be brief.", "metadata": {"a": "b"}, "reasoning": {"effort": "high"}}
    response = await post(client, tools=TOOLS, temperature=0.5, **fields)
    assert response["completed_at"] >= response["created_at"] > 1.7e9
    assert response["output"][2]["call_id"].startswith("call_")
    num_prompt = len(engine.seen[0].prompt_ids)
    num_thinking = len(tokenizer.encode("three plus five</think>", add_special_tokens=False))
    text = {"type": "output_text", "text": "3 + 5 = 8", "annotations": [], "logprobs": []}
    thinking = {"type": "reasoning_text", "text": "three plus five"}
    done = {"status": "completed"}
    assert without_ids(response) == {
        "object": "response",
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "output": [
            {"type": "reasoning", "summary": [], "content": [thinking], **done},
            {"type": "message", "role": "assistant", "content": [text], **done},
            {
                "type": "function_call",
                "name": "calculator",
                "arguments": '{"expression": "3+5"}',
                **done,
            },
        ],
        "usage": {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
            "output_tokens": num_tokens + 1,
            "output_tokens_details": {"reasoning_tokens": num_thinking},
            "total_tokens": num_prompt + num_tokens + 1,
        },
        "model": "abacus",
        "instructions": "Be brief.",
        "previous_response_id": None,
        "background": False,
        "store": True,
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "top_p": 1.0,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "parallel_tool_calls": True,
        "reasoning": {"effort": "high", "summary": None},
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": TOOLS,
        "top_logprobs": 0,
        "truncation": "disabled",
        "service_tier": "default",
        "user": None,
    }
    prompt = tokenizer.decode(engine.seen[0].prompt_ids)
    assert "# Tools" in prompt
    assert "Be brief.<|user|>What is 3+5?<|assistant|>" in prompt


@pytest.mark.parametrize("num_per_step", [1, 3, 200])
@pytest.mark.parametrize("fields", [{}, {"max_output_tokens": 12}])
async def test_a_stream_joins_to_the_whole(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    tokenizer: Tokenizer,
    num_per_step: int,
    fields: dict[str, Any],
):
    script(engine, tokenizer, "use it</think>Well." + CALL + CALL + "Done.", num_per_step)
    whole = await post(client, tools=TOOLS, **fields)
    streamed = await post(client, tools=TOOLS, **fields, stream=True)
    assert [event["sequence_number"] for event in streamed] == list(range(len(streamed)))
    created, in_progress, *pieces, end = streamed
    assert created["type"] == "response.created"
    assert in_progress["type"] == "response.in_progress"
    assert created["response"]["status"] == in_progress["response"]["status"] == "in_progress"
    assert created["response"]["output"] == []
    empty = ("completed_at", "error", "incomplete_details", "usage")
    assert {created["response"][field] for field in empty} == {None}
    assert end["type"] == f"response.{'incomplete' if fields else 'completed'}"
    assert joined(pieces) == end["response"]["output"]
    assert without_ids(end["response"]) == without_ids(whole)


def joined(pieces: list[Any]) -> list[Any]:
    """The items as a client puts them together; checks that what is told as done is what came."""
    items: list[Any] = []
    texts: list[str] = []
    for piece in pieces:
        index = piece["output_index"]
        kind = piece["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert index == len(items)
            assert piece["item"]["status"] == "in_progress"
            items.append(piece["item"])
            texts.append("")
        elif kind == "output_item.done":
            items[index] = piece["item"]
        elif kind == "content_part.added":
            assert piece["part"]["text"] == ""
        elif kind.endswith(".delta"):
            texts[index] += piece["delta"]
        elif kind == "content_part.done":
            assert piece["part"]["text"] == texts[index]
        else:
            said = piece["arguments" if kind.startswith("function_call") else "text"]
            assert said == texts[index]
        assert piece.get("item_id", items[index]["id"]) == items[index]["id"]
    assert index == len(items) - 1
    assert [item.get("arguments", texts[i]) for i, item in enumerate(items)] == texts
    return items


async def test_an_answer_that_was_cut_off_says_so(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
):
    script(engine, tokenizer, "</think>one two three")
    response = await post(client, max_output_tokens=4)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][-1]["status"] == "incomplete"
    assert response["usage"]["output_tokens"] == 4


async def test_items_are_rendered_as_a_chat(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
):
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "3+5"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "a tool"}],
        },
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Well.", "annotations": []}],
        },
        {
            "type": "function_call",
            "call_id": "c",
            "name": "calculator",
            "arguments": '{"expression": "3+5"}',
        },
        {"type": "function_call_output", "call_id": "c", "output": "8"},
        {"role": "user", "content": "So?"},
    ]
    await post(client, input=items, tools=TOOLS)
    prompt = tokenizer.decode(engine.seen[0].prompt_ids)
    assert "<|system|>Be brief.<|user|>3+5<|assistant|>" in prompt
    assert "Well.<tool_call>calculator<arg_key>expression</arg_key><arg_value>3+5<" in prompt
    assert "<|observation|><tool_response>8</tool_response><|user|>So?<|assistant|>" in prompt


@pytest.mark.parametrize("stream", [False, True])
async def test_the_next_request_goes_on_from_the_last(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer, stream: bool
):
    """With the same prompt as if the client had sent everything; instructions are not kept."""
    script(engine, tokenizer, "think</think>Well." + CALL)
    answer = await post(client, tools=TOOLS, instructions="Be brief.", stream=stream)
    first = answer[-1]["response"] if stream else answer
    output = {"type": "function_call_output", "call_id": first["output"][2]["call_id"]} | {
        "output": "8"
    }
    script(engine, tokenizer, "</think>8")
    fields = {"tools": TOOLS, "input": [output], "previous_response_id": first["id"]}
    second = await post(client, **fields, stream=stream)
    second = second[-1]["response"] if stream else second
    third = {"input": "And 1+1?", "previous_response_id": second["id"], "tools": TOOLS}
    await post(client, **third)
    question = {"role": "user", "content": "What is 3+5?"}
    items = [question, *first["output"], output, *second["output"]]
    await post(client, input=[*items, {"role": "user", "content": "And 1+1?"}], tools=TOOLS)
    assert engine.seen[-1].prompt_ids == engine.seen[-2].prompt_ids
    assert "Be brief." not in tokenizer.decode(engine.seen[-1].prompt_ids)


async def test_a_stored_response_can_be_fetched_until_it_is_deleted(client: httpx.AsyncClient):
    response = await post(client)
    path = f"{ROUTE}/{response['id']}"
    assert (await client.get(path)).json() == response
    assert "cannot be streamed again" in (await client.get(f"{path}?stream=true")).text
    refused = await client.post(f"{path}/cancel")
    assert refused.status_code == 400
    assert "Only a response in the background" in refused.text
    deleted = (await client.delete(path)).json()
    assert deleted == {"id": response["id"], "object": "response", "deleted": True}
    for answer in (
        await client.get(path),
        await client.delete(path),
        await client.post(f"{path}/cancel"),
        await client.get(f"{ROUTE}/resp_0"),
        await client.get(f"{ROUTE}/resp_%ff"),
    ):
        assert answer.status_code == 404
        assert "There is no response" in answer.json()["error"]["message"]
    message = await refusal(client, previous_response_id=response["id"])
    assert "There is no response" in message


async def test_what_is_not_to_be_stored_is_not(
    client: httpx.AsyncClient, make_service: MakeService, monkeypatch: pytest.MonkeyPatch
):
    response = await post(client, store=False)
    assert response["store"] is False
    assert (await client.get(f"{ROUTE}/{response['id']}")).status_code == 404
    monkeypatch.setattr(shelf, "MAX_VALUE_BYTES", 100)
    too_large = await post(client)
    assert too_large["store"] is False
    assert "cannot be stored" in await refusal(client, background=True)
    monkeypatch.setattr(shelf, "MAX_VALUE_BYTES", len(json_bytes(response)) + 500)
    too_long = await post(client, input="3+5" * 300, max_output_tokens=1)
    assert too_long["store"] is True
    assert (await client.get(f"{ROUTE}/{too_long['id']}")).json() == too_long
    message = await refusal(client, previous_response_id=too_long["id"])
    assert "is incomplete and cannot be gone on from" in message
    transport = httpx.ASGITransport(build_app(make_service(max_stored_responses=0)))
    async with httpx.AsyncClient(transport=transport, base_url="http://tetrad") as other:
        assert (await post(other))["store"] is False
        for fields in ({"previous_response_id": "resp_1"}, {"background": True}):
            assert "--max-stored-responses 0" in await refusal(other, **fields)
        assert "--max-stored-responses 0" in (await other.get(f"{ROUTE}/resp_1")).text


async def test_a_response_in_the_background(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer, service: Service
):
    script(engine, tokenizer, "</think>8")
    engine.gate.clear()
    begun = await post(client, background=True)
    assert (begun["status"], begun["background"], begun["output"]) == ("in_progress", True, [])
    path = f"{ROUTE}/{begun['id']}"
    assert (await client.get(path)).json() == begun
    assert "is in_progress and cannot" in await refusal(client, previous_response_id=begun["id"])
    engine.gate.set()
    await until(lambda: not service.background)
    ended = (await client.get(path)).json()
    assert ended["status"] == "completed"
    assert ended["output"][0]["content"][0]["text"] == "8"
    assert (await client.post(f"{path}/cancel")).json() == ended


@pytest.mark.parametrize("how", ["cancel", "delete", "fail"])
async def test_a_response_in_the_background_can_end_early(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
):
    monkeypatch.setattr(responses, "POLL_S", 0.01)
    engine.gate.clear()
    if how == "fail":
        engine.script = lambda _: [Step((), Finish("error", message="No luck."))]
    begun = await post(client, background=True)
    path = f"{ROUTE}/{begun['id']}"
    await until(lambda: bool(engine.live))
    if how == "cancel":
        assert (await client.post(f"{path}/cancel")).json()["status"] == "cancelled"
    elif how == "delete":
        await client.delete(path)
    else:
        engine.gate.set()
    await until(lambda: not service.background)
    assert engine.live == {}
    assert service.open_requests == 0
    assert await aborted(client) == (how != "fail")
    ended = await client.get(path)
    if how == "delete":
        assert ended.status_code == 404
    else:
        status = {"cancel": "cancelled", "fail": "failed"}[how]
        assert ended.json()["status"] == status
        assert (ended.json()["error"] or {}).get("message") == (
            None if how == "cancel" else "No luck."
        )


async def test_a_full_queue_refuses_the_background_at_once(
    make_service: MakeService, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    """Not by a response that fails later. Who is turned away before the first step leaves too."""
    monkeypatch.setattr(responses, "POLL_S", 0.01)
    engine.gate.clear()
    engine.info["max_running_requests"] = 1
    service = make_service(max_queued_requests=1)
    async with connect(service) as client:
        begun = await asyncio.gather(*(post(client, background=True) for _ in range(2)))
        assert {each["status"] for each in begun} == {"in_progress"}
        assert "would wait" in await refusal(client, 503, background=True)
        for each in begun:
            await client.post(f"{ROUTE}/{each['id']}/cancel")
        await until(lambda: not service.background)
        assert service.open_requests == 0
        monkeypatch.setattr(service.shelf, "put", lambda *_: False)
        assert "cannot be stored" in await refusal(client, background=True)
        assert service.open_requests == 0


async def test_the_background_is_bounded(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, service: Service
):
    monkeypatch.setattr(responses, "MAX_BACKGROUND", 1)
    engine.gate.clear()
    await post(client, background=True)
    assert "run in the background already" in await refusal(client, 503, background=True)
    engine.gate.set()
    await until(lambda: not service.background)
    service.phase = "draining"
    assert "shutting down" in await refusal(client, 503, background=True)


async def test_a_stream_that_breaks_ends_with_a_failed_response(
    client: httpx.AsyncClient, engine: FakeEngine
):
    engine.script = lambda _: [Step((5,)), Step((), Finish("error", message="No luck."))]
    events = await post(client, stream=True)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "No luck."}
    stored = await client.get(f"{ROUTE}/{events[0]['response']['id']}")
    assert stored.json()["status"] == "failed"
    engine.script = lambda _: [Step((), Finish("error", message="No luck."))]
    assert await refusal(client, 500, stream=True) == "No luck."


async def test_a_client_that_leaves_ends_its_response(
    client: httpx.AsyncClient, engine: FakeEngine, service: Service
):
    engine.gate.clear()
    asking = asyncio.create_task(post(client))
    await until(lambda: bool(engine.live))
    asking.cancel()
    await until(lambda: not engine.live)
    assert service.open_requests == 0


async def test_sampling_fields_of_all_names_reach_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine
):
    await post(
        client,
        temperature=0.5,
        top_k=7,
        min_p=0.1,
        repetition_penalty=1.5,
        ignore_eos=True,
        min_tokens=2,
        max_output_tokens=5,
        seed=9,
        stop=["x"],
        user="u",
        include=["reasoning.encrypted_content"],
        text={"format": {"type": "text"}, "verbosity": "low"},
    )
    sampling = engine.seen[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.min_p) == (0.5, 7, 0.1)
    assert (sampling.min_new_tokens, sampling.max_new_tokens, sampling.seed) == (2, 5, 9)
    assert sampling.repetition_penalty == 1.5
    assert sampling.ignore_eos


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": None}, "input: input should be a valid string or"),
        ({"input": []}, "list should have at least 1 item"),
        ({"input": [{"role": "user"}]}, 'input[0]: an item of type "message" needs content'),
        ({"input": [{"type": "item_reference", "id": "x"}]}, '"item_reference" cannot be read'),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            'input[0].content[0]: a part of type "input_image" cannot be read',
        ),
        ({"tools": [{"type": "web_search"}]}, 'a tool of type "web_search" would run here'),
        ({"top_logprobs": 3}, "/v1/chat/completions has logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "chat has logprobs"),
        ({"truncation": "auto"}, '"disabled" works'),
        ({"conversation": "c"}, "use previous_response_id"),
        ({"prompt": {"id": "p"}}, "use instructions"),
        ({"background": True, "store": False}, "background needs store"),
        ({"background": True, "stream": True}, "poll GET /v1/responses/{id}"),
        ({"n": 2}, "n: input should be less than or equal to 1"),
        ({"model": "gpt-5"}, "'abacus' is."),
    ],
)
async def test_mistakes_are_sentences(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], message: str
):
    assert message in await refusal(client, 404 if "model" in fields else 400, **fields)
    assert engine.seen == []


async def test_whoever_has_another_key_finds_nothing(make_service: MakeService, tmp_path: Path):
    (tmp_path / "keys").write_text("ann k-a\nbob k-b\n")
    transport = httpx.ASGITransport(build_app(make_service(api_key_file=tmp_path / "keys")))
    ann, bob = (
        httpx.AsyncClient(transport=transport, base_url="http://tetrad", headers={"x-api-key": key})
        for key in ("k-a", "k-b")
    )
    async with ann, bob:
        path = f"{ROUTE}/{(await post(ann))['id']}"
        assert (await ann.get(path)).status_code == 200
        for answer in (
            await bob.get(path),
            await bob.delete(path),
            await bob.post(f"{path}/cancel"),
        ):
            assert answer.status_code == 404
        assert (await ann.get(path)).status_code == 200


@pytest.mark.parametrize("how", [{}, {"stream": True}, {"background": True}])
async def test_a_response_has_the_time_it_asks_for(
    client: httpx.AsyncClient, engine: FakeEngine, service: Service, how: dict[str, Any]
):
    engine.step_s = 0.05
    fields = {"timeout": 0.2, "ignore_eos": True, "max_output_tokens": 100}
    if not how:
        assert "within its 0.2 s" in await refusal(client, 504, **fields)
        return
    answer = await post(client, **fields, **how)
    await until(lambda: not service.background)
    if how.get("stream"):
        assert answer[-1]["type"] == "response.failed"
    begun = answer[0]["response"] if how.get("stream") else answer
    ended = (await client.get(f"{ROUTE}/{begun['id']}")).json()
    assert ended["status"] == "failed"
    assert "within its 0.2 s" in ended["error"]["message"]
    assert engine.live == {}
