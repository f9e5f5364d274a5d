"""What clients ask an answer to match, and what the engine is told of it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.server.conftest import MakeService
from tests.server.fake_engine import FakeEngine
from tetrad.core.request import MAX_GRAMMAR_BYTES, Grammar
from tetrad.server.app import build_app

OPEN_ID, CLOSE_ID, CALL_ID = 501, 502, 503
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
TEXT = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"type":"string"}}}'
STRUCTURE = {"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}
TOOL = {"type": "function", "function": {"name": "calc", "parameters": SCHEMA}}
STRICT = {"type": "function", "function": {"name": "calc", "parameters": SCHEMA, "strict": True}}
USER = [{"role": "user", "content": "3+5"}]
THOUGHTLESS = {"chat_template_kwargs": {"enable_thinking": False}}


async def asked(client: httpx.AsyncClient, engine: FakeEngine, **fields: Any) -> Grammar | None:
    """What a chat without reasoning makes of them."""
    body = {"messages": USER, "max_tokens": 2} | THOUGHTLESS | fields
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return engine.seen[-1].sampling.grammar


def tag(form: dict[str, Any]) -> str:
    return json.dumps({"type": "structural_tag", "format": form}, separators=(",", ":"))


OR = {"type": "or", "elements": [{"type": "const_string", "value": v} for v in ("red", 'a"b')]}
TRIGGERED = {
    "type": "triggered_tags",
    "triggers": ["<f>"],
    "tags": [
        {
            "type": "tag",
            "begin": "<f>",
            "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
            "end": "</f>",
        }
    ],
}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        (
            {"response_format": {"type": "json_object"}},
            ("json_schema", '{"type":"object"}', "response_format"),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
                }
            },
            ("json_schema", TEXT, "response_format"),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            ("json_schema", '{"type":"object"}', "response_format"),
        ),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "structures": [STRUCTURE],
                    "triggers": ["<f>"],
                }
            },
            ("structural_tag", tag(TRIGGERED), "response_format"),
        ),
        (
            {"response_format": {"type": "structural_tag", "format": OR}},
            ("structural_tag", tag(OR), "response_format"),
        ),
        ({"regex": "a+"}, ("regex", "a+", "regex")),
        ({"ebnf": 'root ::= "a"'}, ("ebnf", 'root ::= "a"', "ebnf")),
        ({"json_schema": TEXT}, ("json_schema", TEXT, "json_schema")),
        ({"structural_tag": tag(OR)}, ("structural_tag", tag(OR), "structural_tag")),
        ({"guided_json": SCHEMA}, ("json_schema", TEXT, "guided_json")),
        ({"guided_regex": "a"}, ("regex", "a", "guided_regex")),
        ({"guided_choice": ["red", 'a"b']}, ("structural_tag", tag(OR), "guided_choice")),
        ({"guided_grammar": 'start: "a"'}, ("lark", 'start: "a"', "guided_grammar")),
        ({"guided_grammar": 'root ::= "a"'}, ("ebnf", 'root ::= "a"', "guided_grammar")),
        (
            {"structured_outputs": {"json": SCHEMA}},
            ("json_schema", TEXT, "structured_outputs.json"),
        ),
        (
            {"structured_outputs": {"json_object": True}},
            ("json_schema", '{"type":"object"}', "structured_outputs.json_object"),
        ),
        (
            {"structured_outputs": {"choice": ["red", 'a"b']}},
            ("structural_tag", tag(OR), "structured_outputs.choice"),
        ),
        ({"structured_outputs": {"regex": "a"}}, ("regex", "a", "structured_outputs.regex")),
        ({"tools": [TOOL]}, None),
        ({"tools": [STRICT], "tool_choice": "none"}, None),
    ],
)
async def test_every_servers_names(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], expected: Any
):
    grammar = await asked(client, engine, **fields)
    assert grammar == (None if expected is None else Grammar(*expected))


@pytest.mark.parametrize("route", ["/v1/completions", "/generate"])
async def test_routes_without_messages(client: httpx.AsyncClient, engine: FakeEngine, route: str):
    body = {"prompt": "3", "regex": "a", "max_tokens": 2}
    if route == "/generate":
        body = {"text": "3", "sampling_params": {"json_schema": TEXT, "max_new_tokens": 2}}
    assert (await client.post(route, json=body)).status_code == 200
    grammar = engine.seen[-1].sampling.grammar
    assert grammar is not None
    assert grammar.close_id is None
    assert grammar.text == ("a" if route == "/v1/completions" else TEXT)


@pytest.mark.parametrize(
    ("fields", "ids"),
    [
        ({}, (CLOSE_ID, None, CALL_ID)),
        (THOUGHTLESS, (None, None, None)),
        ({"add_generation_prompt": False}, (CLOSE_ID, OPEN_ID, CALL_ID)),
    ],
)
async def test_nothing_is_constrained_before_the_reasoning_has_ended(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], ids: Any
):
    body = {"messages": USER, "max_tokens": 2, "regex": "a"} | fields
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    grammar = engine.seen[-1].sampling.grammar
    assert grammar is not None
    assert (grammar.close_id, grammar.open_id, grammar.call_id) == ids


async def test_without_a_reasoning_parser_the_whole_output_is_constrained(
    make_service: MakeService, engine: FakeEngine
):
    service = make_service(reasoning_parser="none")
    service.model = replace(service.model, reasoning_parser=None)
    transport = httpx.ASGITransport(build_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
        body = {"messages": USER, "max_tokens": 2, "regex": "a"}
        await client.post("/v1/chat/completions", json=body)
    assert engine.seen[-1].sampling.grammar == Grammar("regex", "a", "regex")


async def test_too_long_a_grammar_is_refused(client: httpx.AsyncClient):
    body = {"prompt": "3", "regex": "a" * (MAX_GRAMMAR_BYTES + 1)}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert str(MAX_GRAMMAR_BYTES) in response.json()["error"]["message"]


async def form_of(client: httpx.AsyncClient, engine: FakeEngine, **fields: Any) -> Any:
    grammar = await asked(client, engine, **fields)
    assert grammar is not None
    assert grammar.kind == "structural_tag"
    return json.loads(grammar.text)["format"]


async def test_forced_calls(client: httpx.AsyncClient, engine: FakeEngine):
    other = {"type": "function", "function": {"name": "other"}}
    form = await form_of(client, engine, tools=[TOOL, other], tool_choice="required")
    calls = form["elements"][1]
    assert [t["begin"] for t in calls["tags"]] == ["<tool_call>calc", "<tool_call>other"]
    assert calls["tags"][0]["content"]["json_schema"] == SCHEMA
    assert (calls["at_least_one"], calls["stop_after_first"]) == (True, False)
    named = {"type": "function", "function": {"name": "other"}}
    form = await form_of(client, engine, tools=[TOOL, other], tool_choice=named)
    calls = form["elements"][1]
    assert [t["begin"] for t in calls["tags"]] == ["<tool_call>other"]
    assert calls["stop_after_first"]
    form = await form_of(
        client, engine, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    )
    assert form["elements"][1]["stop_after_first"]


async def test_calls_in_text(client: httpx.AsyncClient, engine: FakeEngine):
    form = await form_of(client, engine, tools=[STRICT, TOOL])
    assert (form["type"], form["triggers"]) == ("triggered_tags", ["<tool_call>"])
    schemas = [t["content"]["json_schema"] for t in form["tags"]]
    assert schemas == [SCHEMA, {"type": "object"}]
    assert not form["stop_after_first"]
    form = await form_of(client, engine, tools=[TOOL], parallel_tool_calls=False)
    assert form["stop_after_first"]


async def test_calls_or_a_format(client: httpx.AsyncClient, engine: FakeEngine):
    form = await form_of(client, engine, tools=[TOOL], regex="a+")
    assert form["type"] == "or"
    assert form["elements"][0] == {"type": "regex", "pattern": "a+"}
    assert form["elements"][1]["elements"][1]["type"] == "tags_with_separator"


async def test_calls_can_be_forced_only_where_they_can_be_read(
    make_service: MakeService, engine: FakeEngine
):
    service = make_service()
    service.model = replace(service.model, tool_call_parser=None)
    transport = httpx.ASGITransport(build_app(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
        function: Any = TOOL["function"]
        named = {"type": "function", "function": {"name": function["name"]}}
        choices: list[Any] = ["required", named]
        for choice in choices:
            body = {"messages": USER, "max_tokens": 2, "tools": [TOOL], "tool_choice": choice}
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 400
            assert "--tool-call-parser and one of glm45, " in response.json()["error"]["message"]
        for choice in ("auto", None):
            body = {"messages": USER, "max_tokens": 2, "tools": [STRICT], "tool_choice": choice}
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            assert "--tool-call-parser" in response.headers["x-tetrad-warning"]
            assert engine.seen[-1].sampling.grammar is None
