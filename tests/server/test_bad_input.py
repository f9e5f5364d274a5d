"""Whatever a client sends: a 4xx with a sentence in OpenAI's shape, before any stream starts."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.conftest import MakeService
from tests.server.fake_engine import FakeEngine
from tetrad.core.config import ServeConfig
from tetrad.server.apis.messages import routes as messages
from tetrad.server.apis.messages.protocol import CountBody, MessagesBody
from tetrad.server.apis.native.protocol import GenerateBody
from tetrad.server.apis.openai.protocol import ChatBody, CompletionBody
from tetrad.server.apis.responses import routes as responses
from tetrad.server.apis.responses.protocol import ResponsesBody
from tetrad.server.app import build_app
from tetrad.server.bodies.read import WARNING_HEADER, Body
from tetrad.server.model import ServedModel
from tetrad.server.text.tokenizer import Tokenizer

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
USER = [{"role": "user", "content": "3"}]


def sentence(response: httpx.Response, status: int = 400) -> str:
    """Check the error's shape; return its message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": None}, "messages", "valid array"),
        ({"messages": "hi"}, "messages", "valid array"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'system'"),
        ({"messages": [{"role": "user"}]}, "messages[0]", "role user needs content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "valid string or"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
            'type "image_url" cannot be read',
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function",
            "the text of a JSON object",
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
            "tool_choice",
            "of type 'allowed_tools' is not supported; \"auto\"",
        ),
        ({"temperature": "0.5"}, "temperature", "valid number"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_k": 2.5}, "top_k", "valid integer"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": True}, "max_tokens", "valid integer"),
        ({"max_tokens": 2**70}, "max_tokens", "less than or equal"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "min_tokens is 9"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 1000}, "n", "less than or equal to 128"),
        ({"stop": ""}, "stop", "1 to 512 characters"),
        ({"stop": ["x"] * 33}, "stop", "at most 32 stop strings"),
        ({"stop": 5}, "stop", "valid string or"),
        ({"seed": 2**64}, "seed", "less than or equal"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", "match pattern"),
        ({"logit_bias": {"5": 1000}}, "logit_bias.5", "less than or equal to 100"),
        ({"logit_bias": {"5000": 1}}, "logit_bias", "token id 5000"),
        ({"stop_token_ids": [5000]}, "stop_token_ids", "token id 5000"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "greater than or equal to 0"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs to be true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"tools": [{"type": "web"}]}, "tools[0].type", "'function'"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
            "match pattern",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema"),
        ({"regex": 3}, "regex", "string"),
        ({"guided_choice": []}, "guided_choice", "at least 1 item"),
        ({"regex": "a+", "ebnf": ""}, "ebnf", "regex and ebnf cannot both"),
        ({"structural_tag": "{"}, "structural_tag", "not valid JSON"),
        ({"structural_tag": "[]"}, "structural_tag", "must be a JSON object"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "none of tools"),
        ({"functions": [{"name": "f"}]}, "functions", "replaced by tools"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "set by the server"),
        ({"stream": "yes"}, "stream", "valid boolean"),
    ],
)
async def test_chat_fields(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], param: str, message: str
):
    for stream in ({}, {"stream": True}):
        response = await client.post(CHAT, json={"messages": USER, **stream, **fields})
        assert message in sentence(response)
        assert response.json()["error"]["param"] == param
    assert engine.seen == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "prompt: field required"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ""}, "The prompt is empty"),
        ({"prompt": [5000]}, "token id 5000"),
        ({"prompt": [-1]}, "greater than or equal to 0"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["3"] * 20, "n": 100}, "2000 answers"),
        ({"prompt": "3", "echo": True, "logprobs": 1}, "echo: needs logprobs to be left out"),
        ({"prompt": "3", "suffix": "x"}, "suffix: is not supported"),
        ({"prompt": "3", "n": 3, "best_of": 2}, "best_of: must be n, which is 3, or more"),
        ({"prompt": "3", "best_of": 2, "stream": True}, "best_of: needs stream to be false"),
    ],
)
async def test_completion_fields(client: httpx.AsyncClient, fields: dict[str, Any], message: str):
    assert message in sentence(await client.post(COMPLETIONS, json=fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "either text or input_ids"),
        ({"text": "3", "input_ids": [3]}, "either text or input_ids"),
        ({"text": ["3"], "sampling_params": [{}, {}]}, "2 sampling_params for 1 prompts"),
        ({"text": ["3", "5"], "rid": "a"}, "name each of the 2 prompts"),
        (
            {"text": "3", "sampling_params": {"max_new_tokens": -1}},
            "sampling_params.max_new_tokens",
        ),
        ({"text": "3", "sampling_params": {"regex": "", "ebnf": ""}}, "cannot both"),
        ({"text": "3", "logprob_start_len": 0}, "log-probabilities of the prompt"),
    ],
)
async def test_native_fields(client: httpx.AsyncClient, fields: dict[str, Any], message: str):
    assert message in sentence(await client.post(GENERATE, json=fields))


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, GENERATE, RESPONSES])
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "\xff"}], "prompt": "\xff", "text": "\xff"}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}], "prompt": "\\ud800"}',
        b'{"temperature": NaN, "sampling_params": {"temperature": NaN}}',
        b'{"temperature": 1e999, "sampling_params": {"temperature": 1e999}}',
        b'{"n": ' + b"9" * 6000 + b"}",
        b'{"tools": ' + b"[" * 8_000 + b"]" * 8_000 + b"}",
        b'{"text": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
    ],
)
async def test_bodies_that_are_no_json_object(client: httpx.AsyncClient, route: str, raw: bytes):
    sentence(await client.post(route, content=raw))


async def test_of_a_key_that_comes_twice_the_last_counts(client: httpx.AsyncClient):
    """As in most readers of JSON; nothing is judged by another value than is used."""
    raw = b'{"prompt": ["3"], "n": %b, "n": %b}'
    response = await client.post(COMPLETIONS, content=raw % (b"0", b"2"))
    assert len(response.json()["choices"]) == 2
    assert "n: " in sentence(await client.post(COMPLETIONS, content=raw % (b"2", b"0")))


async def test_too_long_a_prompt_says_both_lengths(client: httpx.AsyncClient, engine: FakeEngine):
    for fields in ({}, {"stream": True}, {"max_tokens": 1}):
        response = await client.post(COMPLETIONS, json={"prompt": "3" * 300, **fields})
        message = sentence(response)
        assert "300 tokens" in message
        assert "256" in message
    response = await client.post(COMPLETIONS, json={"prompt": "3" * 250, "max_tokens": 7})
    assert "max_tokens can be at most 6" in sentence(response)
    assert engine.live == {}


async def test_one_bad_prompt_of_several_ends_the_others(
    client: httpx.AsyncClient, engine: FakeEngine
):
    engine.step_s = 0.01
    response = await client.post(COMPLETIONS, json={"prompt": ["3", "3" * 300]})
    assert "300 tokens" in sentence(response)
    assert engine.live == {}


async def test_a_body_that_is_too_large(make_service: MakeService):
    """By default there is room for a prompt of any context."""
    assert ServeConfig().max_request_body >= 1
    service = make_service(max_request_body=1000 / 2**20)
    transport = httpx.ASGITransport(build_app(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://tetrad") as client:
        announced = sentence(await client.post(CHAT, content=b" " * 1001), 413)
        assert "larger than 0.000953674 MiB" in announced

        async def unannounced():
            for _ in range(3):
                yield b" " * 500

        assert "larger than" in sentence(await client.post(CHAT, content=unannounced()), 413)


def list_schemas(node: Any) -> Iterator[dict[str, Any]]:
    """Every list of a pydantic core schema."""
    if isinstance(node, dict):
        if node.get("type") == "list" and node.get("items_schema", {}).get("type") != "any":
            yield node
        node = list(node.values())
    if isinstance(node, list | tuple):
        for child in node:
            yield from list_schemas(child)


@pytest.mark.parametrize(
    "body", [ChatBody, CompletionBody, GenerateBody, ResponsesBody, MessagesBody, CountBody]
)
def test_a_list_ends_at_its_first_mistake(body: type[Body]):
    """A body of many megabytes would else give gigabytes of errors, and minutes of silence."""
    schemas = list(list_schemas(body.__pydantic_core_schema__))
    assert len(schemas) >= 4
    assert all(schema.get("fail_fast") for schema in schemas)


async def test_a_mapping_is_counted_before_it_is_read(client: httpx.AsyncClient):
    bias = {f"x{i}": 1 for i in range(5000)}
    message = sentence(await client.post(CHAT, json={"messages": USER, "logit_bias": bias}))
    assert "at most 4096 tokens can be biased, not 5000" in message


async def test_errors_are_short_whatever_was_sent(client: httpx.AsyncClient):
    long = "abacus" * 100_000
    for fields, status in (
        ({"model": long}, 404),
        ({"response_format": {"type": long}}, 400),
        ({"logit_bias": {long: 1}}, 400),
        ({"messages": [{"role": "user", "content": [{"type": long}]}]}, 400),
    ):
        response = await client.post(CHAT, json={"messages": USER, **fields})
        assert len(sentence(response, status)) <= 2000
        assert len(response.content) < 10_000


async def test_a_hopelessly_long_text_is_not_tokenised(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Tokenizer, "encode", None)
    text = "x" * (256 * 32 + 1)
    for route, fields in (
        (CHAT, {"messages": [{"role": "user", "content": text}]}),
        (COMPLETIONS, {"prompt": ["3", text]}),
        (GENERATE, {"text": text}),
    ):
        message = sentence(await client.post(route, json=fields))
        assert "a context of 256 tokens is for 8192 characters" in message


async def test_a_long_conversation_is_rendered_beside_the_event_loop(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
):
    threads = []

    def render(*_: Any) -> str:
        threads.append(threading.current_thread())
        return "3"

    monkeypatch.setattr(ServedModel, "render", render)
    tool = {"type": "function", "function": {"name": "f"}}
    for fields in (
        {"messages": USER},
        {"messages": USER * 33},
        {"messages": [{"role": "user", "content": "x" * 17_000}]},
        {"messages": USER, "tools": [tool]},
    ):
        response = await client.post(CHAT, json=fields)
        assert response.status_code == 200, response.text
    assert [thread is threading.main_thread() for thread in threads] == [True, False, False, False]


async def test_other_models_paths_and_methods(client: httpx.AsyncClient):
    response = await client.post(CHAT, json={"model": "abacas", "messages": USER})
    assert "'abacus' is." in sentence(response, 404)
    assert response.json()["error"]["param"] == "model"
    said = sentence(await client.get("/v1/chat/completion"), 404)
    assert said == (
        "There is no '/v1/chat/completion' here; perhaps '/v1/chat/completions' is meant."
    )
    said = sentence(await client.get("/nowhere"), 404)
    assert said == "There is no '/nowhere' here; /openapi.json lists what there is."
    response = await client.get(CHAT)
    assert "GET is not possible on '/v1/chat/completions', but POST." in sentence(response, 405)
    assert response.headers["allow"] == "POST"
    response = await client.delete(GENERATE)
    assert ", but POST, PUT." in sentence(response, 405)
    assert response.headers["allow"] == "POST, PUT"


async def test_who_asks_for_the_head_alone_changes_nothing(client: httpx.AsyncClient):
    assert (await client.head("/health")).status_code == 200
    assert (await client.head("/flush_cache")).status_code == 405


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/v1/embeddings", "no embeddings"),
        ("/rerank", "no embeddings"),
        ("/v1/rerank", "no embeddings"),
        ("/v1/audio/speech", "reads and writes text"),
        ("/v1/audio/voices/x", "reads and writes text"),
        ("/v1/batches", "keeps no files"),
        ("/v1/files/file-1/content", "keeps no files"),
        ("/v1/threads/t/runs", "keeps no files"),
    ],
)
async def test_routes_of_other_servers_say_why_they_are_not_here(
    client: httpx.AsyncClient, path: str, reason: str
):
    for method in ("POST", "GET", "DELETE"):
        assert reason in sentence(await client.request(method, path), 400)


async def test_what_only_openai_does_with_responses_is_no_response(client: httpx.AsyncClient):
    assert "is compacted" in sentence(await client.post(f"{RESPONSES}/compact", json={}))
    assert "/tokenize" in sentence(await client.post(f"{RESPONSES}/input_tokens", json={}))


@pytest.mark.parametrize("name", ["self", "args", "context", "range", "strftime_now", "", "a b"])
async def test_template_variables_have_any_name(client: httpx.AsyncClient, name: str):
    response = await client.post(
        CHAT, json={"messages": USER, "chat_template_kwargs": {name: [1, {"self": None}]}}
    )
    assert response.status_code == 200, response.text


async def test_what_client_libraries_add_is_ignored(client: httpx.AsyncClient):
    extras = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "parallel_tool_calls": True,
        "service_tier": "auto",
        "stream_options": {"include_usage": True, "include_obfuscation": False},
        "lora_path": None,
        "model": "default",
        "stop": None,
        "tools": None,
        "logit_bias": None,
    }
    response = await client.post(CHAT, json={"messages": USER, **extras})
    assert response.status_code == 200, response.text
    assert WARNING_HEADER not in response.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unknown_field_is_a_warning(client: httpx.AsyncClient, stream: bool):
    fields: dict[str, Any] = {
        "temprature": {"a": [1]},
        "messages": [USER[0] | {"nam": "x"}],
        "stream_options": {"include_usgae": 1},
    }
    response = await client.post(CHAT, json={"messages": USER, "stream": stream, **fields})
    assert response.status_code == 200, response.text
    assert response.headers[WARNING_HEADER] == (
        "Unknown field 'temprature'. Did you mean 'temperature'? "
        "Unknown field 'include_usgae' in stream_options. Did you mean 'include_usage'? "
        "Unknown field 'nam' in messages[0]. Did you mean 'name'?"
    )
    assert int(response.headers.get("content-length", len(response.content))) == len(
        response.content
    )


async def test_a_warning_is_bounded_and_fit_for_a_header(client: httpx.AsyncClient):
    fields = {f"é\r\nSet-Cookie: {i}" + "x" * 5000: 1 for i in range(1000)}
    for route in (CHAT, COMPLETIONS, GENERATE, "/tokenize"):
        common: dict[str, Any] = {"messages": USER} if route == CHAT else {"prompt": "3"}
        if route == GENERATE:
            common = {"text": "3"}
        response = await client.post(route, json=fields | common)
        assert response.status_code == 200, response.text
        warning = response.headers[WARNING_HEADER]
        assert warning.startswith("Unknown field '\\xe9\\r\\nSet-Cookie: 0xx")
        assert len(warning) < 500
        assert "set-cookie" not in response.headers


async def test_the_strict_api_refuses_what_it_does_not_know(make_service: MakeService):
    app = build_app(make_service(strict_api=True))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://tetrad") as client:
        for route, fields, name in (
            (CHAT, {"messages": USER, "temprature": 0}, "temprature"),
            (CHAT, {"messages": [USER[0] | {"cntent": 1}]}, "messages[0].cntent"),
            (GENERATE, {"text": "3", "sampling_params": {"top": 1}}, "sampling_params.top"),
        ):
            response = await client.post(route, json=fields)
            assert "--strict-api" in sentence(response)
            assert response.json()["error"]["param"] == name
        tool = {"type": "function", "function": {"name": "f", "x": 1}, "cache_control": {}}
        known = {"messages": USER, "user": "u", "tools": [tool]}
        assert (await client.post(CHAT, json=known)).status_code == 200


@pytest.mark.parametrize("num_parts", [1, 1000])
async def test_a_long_conversation_is_translated_beside_the_event_loop(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, num_parts: int
):
    threads = []

    def note(_body: Body, *_: Any) -> ChatBody:
        threads.append(threading.current_thread())
        return ChatBody.model_validate({"messages": USER})

    monkeypatch.setattr(messages, "chat_of", note)
    monkeypatch.setattr(responses, "chat_of", note)
    for route, fields in (
        (MESSAGES, {"messages": USER * num_parts, "max_tokens": 5}),
        (f"{MESSAGES}/count_tokens", {"messages": USER * num_parts}),
        (RESPONSES, {"input": USER * num_parts}),
    ):
        response = await client.post(route, json=fields)
        assert response.status_code == 200, response.text
    is_main = [thread is threading.main_thread() for thread in threads]
    assert is_main == [num_parts == 1] * 3


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
WORDS = [
    "type",
    "role",
    "content",
    "text",
    "name",
    "id",
    "input",
    "output",
    "arguments",
    "call_id",
    "tool_use_id",
    "function",
    "tools",
    "parameters",
    "input_schema",
    "format",
    "schema",
    "json_schema",
    "effort",
    "enabled",
    "thinking",
    "summary",
    "user",
    "assistant",
    "system",
    "tool",
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "tool_use",
    "tool_result",
    "redacted_thinking",
    "input_text",
    "output_text",
    "disabled",
    "auto",
    "none",
    "required",
    "any",
    "custom",
]
telling_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([*WORDS, "{}", "[]", ""]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=5)
    ),
    max_leaves=12,
)
"""JSON whose keys and texts are those that translating looks for."""
LEAST: dict[str, tuple[type[Body], dict[str, Any]]] = {
    CHAT: (ChatBody, {"messages": USER}),
    RESPONSES: (ResponsesBody, {"input": "3"}),
    MESSAGES: (MessagesBody, {"messages": USER, "max_tokens": 5}),
}


@pytest.mark.parametrize("route", LEAST)
@pytest.mark.parametrize("values", [json_values, telling_values])
@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(data=st.data())
async def test_any_json_in_any_field_is_never_a_500(
    client: httpx.AsyncClient,
    route: str,
    values: st.SearchStrategy[Any],
    data: st.DataObject,
):
    body, least = LEAST[route]
    names = st.sampled_from(sorted(body.model_fields))
    fields = data.draw(st.dictionaries(names, values, max_size=4))
    response = await client.post(route, content=json.dumps(least | fields).encode())
    assert response.status_code in (200, 400, 404, 504), response.text


@pytest.mark.parametrize("route", [RESPONSES, MESSAGES])
@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(items=st.lists(telling_values, min_size=1, max_size=4))
async def test_any_conversation_is_never_a_500(
    client: httpx.AsyncClient, route: str, items: list[Any]
):
    body = {"input": items} if route == RESPONSES else {"messages": items, "max_tokens": 5}
    response = await client.post(route, content=json.dumps(body).encode())
    assert response.status_code in (200, 400), response.text


async def test_client_libraries_recognise_what_is_longer_than_the_context(
    client: httpx.AsyncClient, engine: FakeEngine
):
    """By its code, and by words that LangChain and LiteLLM look for."""
    long = [7] * 300
    response = await client.post(COMPLETIONS, json={"prompt": long, "max_tokens": 1})
    assert "prompt is too long: 300 tokens > 255 maximum" in sentence(response)
    assert "exceeds the available context size" in sentence(response)
    assert response.json()["error"]["code"] == "context_length_exceeded"
    response = await client.post(COMPLETIONS, json={"prompt": long[:200], "max_tokens": 100})
    assert "exceeds the available context size: 300, but the context" in sentence(response)
    assert response.json()["error"]["code"] == "context_length_exceeded"
    message = {"role": "user", "content": "3" * 300}
    response = await client.post(MESSAGES, json={"messages": [message], "max_tokens": 1})
    error = response.json()["error"]
    assert "prompt is too long: " in error["message"]
    assert error["details"] == {"error_code": "context_length_exceeded"}


async def test_a_message_as_openais_sdk_dumps_it_comes_back(client: httpx.AsyncClient):
    dumped = {"role": "assistant", "content": "3", "function_call": None, "tool_calls": None}
    response = await client.post(CHAT, json={"messages": [*USER, dumped, *USER]})
    assert response.status_code == 200
    assert WARNING_HEADER not in response.headers
    called = dumped | {"function_call": {"name": "f", "arguments": "{}"}}
    response = await client.post(CHAT, json={"messages": [*USER, called, *USER]})
    assert "replaced by tool_calls" in sentence(response)
